//! dlattn from Rust by its C API, dlattn/c.h: causal attention on the CPU, checked against float64.
//! On a GPU, data are device pointers (as cudarc's), device_type is 1, and the stream a CUstream.
//!
//! DLATTN_LIB_DIR=... cargo run

use std::ffi::{c_char, c_void, CStr};

/// The structs of dlattn/c.h, field by field; `bindgen` writes the same.
#[repr(C)]
#[derive(Clone, Copy)]
struct DlattnTensor {
    data: *mut c_void,
    batch_stride: i64,
    row_stride: i64,
    head_stride: i64,
    col_stride: i64,
    dtype: i32,
    reserved: i32,
}

#[repr(C)]
struct DlattnAttention {
    struct_size: usize,
    device_type: i32,
    device_index: i32,
    q: DlattnTensor,
    k: DlattnTensor,
    v: DlattnTensor,
    out: DlattnTensor,
    lse: DlattnTensor,
    batch_size: i64,
    seqlen_q: i64,
    seqlen_k: i64,
    num_heads: i64,
    num_heads_kv: i64,
    head_dim: i64,
    head_dim_v: i64,
    softmax_scale: f64,
    softcap: f64,
    causal: i32,
    precision: i32,
    has_window_left: i32,
    has_window_right: i32,
    window_left: i64,
    window_right: i64,
    q_descale: DlattnTensor,
    k_descale: DlattnTensor,
    v_descale: DlattnTensor,
    heads_per_q_descale: i64,
    bias: DlattnTensor,
    mask: DlattnTensor,
    alibi_slopes: DlattnTensor,
    sinks: DlattnTensor,
    cu_seqlens_q: *const i32,
    cu_seqlens_k: *const i32,
    seqused_k: *const i32,
    total_q: i64,
    total_k: i64,
    quantized_kv: *const c_void,
    workspace: *mut c_void,
    workspace_bytes: i64,
    page_table: *const i32,
    page_table_batch_stride: i64,
    page_size: i64,
    num_pages: i64,
    cache_batch_idx: *const i32,
    cache_batch_size: i64,
    leftpad_k: *const i32,
}

const DLATTN_OK: i32 = 0;
const DLATTN_FLOAT32: i32 = 2;
const DLATTN_BOTTOM_RIGHT: i32 = 1;

#[link(name = "dlattn")]
extern "C" {
    fn dlattn_version() -> i32;
    fn dlattn_last_error() -> *const c_char;
    fn dlattn_attention(
        params: *const DlattnAttention,
        stream: *mut c_void,
        options: *const c_void,
    ) -> i32;
}

/// (seqlen, heads, columns), contiguous.
fn tensor(data: &[f32], heads: usize, columns: usize) -> DlattnTensor {
    DlattnTensor {
        data: data.as_ptr() as *mut c_void,
        batch_stride: data.len() as i64,
        row_stride: (heads * columns) as i64,
        head_stride: columns as i64,
        col_stride: 1,
        dtype: DLATTN_FLOAT32,
        reserved: 0,
    }
}

fn last_error() -> String {
    unsafe { CStr::from_ptr(dlattn_last_error()) }.to_string_lossy().into_owned()
}

fn main() {
    let (seqlen, heads, dim) = (50, 3, 16);
    let wave = |frequency: f32| -> Vec<f32> {
        (0..seqlen * heads * dim).map(|i| (frequency * i as f32).sin()).collect()
    };
    let (q, k, v) = (wave(0.37), wave(0.21), wave(0.53));
    let mut out = vec![f32::NAN; q.len()];

    // All zero is the default of every field.
    let mut attention: DlattnAttention = unsafe { std::mem::zeroed() };
    attention.struct_size = std::mem::size_of::<DlattnAttention>();
    attention.q = tensor(&q, heads, dim);
    attention.k = tensor(&k, heads, dim);
    attention.v = tensor(&v, heads, dim);
    attention.out = tensor(&out, heads, dim);
    attention.out.data = out.as_mut_ptr() as *mut c_void;
    attention.batch_size = 1;
    attention.seqlen_q = seqlen as i64;
    attention.seqlen_k = seqlen as i64;
    attention.num_heads = heads as i64;
    attention.num_heads_kv = heads as i64;
    attention.head_dim = dim as i64;
    attention.head_dim_v = dim as i64;
    attention.causal = DLATTN_BOTTOM_RIGHT;
    let code = unsafe { dlattn_attention(&attention, std::ptr::null_mut(), std::ptr::null()) };
    assert_eq!(code, DLATTN_OK, "{}", last_error());

    let mut worst = 0.0f64;
    for i in 0..seqlen {
        for h in 0..heads {
            let row = |x: &[f32], at: usize| -> Vec<f64> {
                let first = (at * heads + h) * dim;
                x[first..first + dim].iter().map(|&value| f64::from(value)).collect()
            };
            let scale = 1.0 / (dim as f64).sqrt();
            let weights: Vec<f64> = (0..=i)
                .map(|j| row(&q, i).iter().zip(row(&k, j)).map(|(a, b)| a * b).sum::<f64>())
                .map(|product| (product * scale).exp())
                .collect();
            let total: f64 = weights.iter().sum();
            for (c, &got) in row(&out, i).iter().enumerate() {
                let sum: f64 = weights.iter().enumerate().map(|(j, w)| w * row(&v, j)[c]).sum();
                let error = (got - sum / total).abs();
                worst = if error <= worst { worst } else { error };
            }
        }
    }
    println!("dlattn {}: largest error {worst:.1e}", unsafe { dlattn_version() });
    assert!(worst < 1e-6);

    attention.softmax_scale = f64::NAN;
    let code = unsafe { dlattn_attention(&attention, std::ptr::null_mut(), std::ptr::null()) };
    assert_ne!(code, DLATTN_OK);
    println!("refused: {}", last_error());
}
