// DLATTN_LIB_DIR: the folder of libdlattn.so, `lib` beside what `python -m dlattn --include-dir` prints.
fn main() {
    let folder = std::env::var("DLATTN_LIB_DIR").expect("DLATTN_LIB_DIR: the folder of libdlattn.so");
    println!("cargo:rustc-link-search=native={folder}");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    println!("cargo:rerun-if-env-changed=DLATTN_LIB_DIR");
}
