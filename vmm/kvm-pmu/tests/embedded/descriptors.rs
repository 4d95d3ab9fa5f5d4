//! Descriptors that are not what they are said to be: each is an error that names the call.

use std::fs::File;
use std::os::fd::AsFd;

use kvm_bindings::KVM_CAP_PMU_CAPABILITY;
use kvm_pmu::{
    Errno, KvmVcpu, KvmVm, SetupError, TrapMode, VcpuId, switch_off_vpmu, vcpu_fd, vm_fd,
};

use super::sys::Call;
use super::vmm::Vmm;
use super::{can_run, sys};

#[test]
fn what_is_no_vm_is_refused() {
    if !can_run("what_is_no_vm_is_refused") {
        return;
    }
    let vmm = Vmm::new(TrapMode::Auto);
    let vcpu = vmm.vm.create_vcpu(0).unwrap();
    let refused = |what: &str, fd: &dyn AsFd| {
        let told = KvmVm::new(fd.as_fd()).unwrap_err().to_string();
        let beginning = "KvmVm::new: the descriptor is no VM's: ";
        assert!(told.starts_with(beginning), "{what}: {told}");
    };
    refused("KVM itself", &File::open("/dev/kvm").unwrap());
    refused("a file", &File::open("/dev/null").unwrap());
    refused("a vCPU", &vcpu_fd(&vcpu));
}

#[test]
fn what_is_no_vcpu_is_refused() {
    if !can_run("what_is_no_vcpu_is_refused") {
        return;
    }
    let vmm = Vmm::new(TrapMode::Auto);
    let vm = KvmVm::new(vm_fd(&vmm.vm)).unwrap();
    let vcpu = vmm.vm.create_vcpu(7).unwrap();
    let made = |fd: &dyn AsFd| {
        let made = KvmVcpu::new(fd.as_fd(), &vm, VcpuId(7));
        made.map(drop).map_err(|error| error.to_string())
    };
    let is_refused = |what: &str, fd: &dyn AsFd| {
        let made = made(fd);
        println!("{what}: {made:?}");
        let beginning = "KvmVcpu::new: the descriptor is not vCPU 7's: ";
        made.is_err_and(|told| told.starts_with(beginning))
    };
    assert!(is_refused("KVM itself", &File::open("/dev/kvm").unwrap()));
    assert!(is_refused("a file", &File::open("/dev/null").unwrap()));
    assert!(is_refused("the VM", &vm));
    // KVM knows the process that has made a VM.
    let inherited = || is_refused("a vCPU of another process", &vcpu_fd(&vcpu));
    assert!(sys::in_a_child(inherited));
    assert_eq!(made(&vcpu_fd(&vcpu)), Ok(()));
}

/// The VMM may let its own descriptors go.
#[test]
fn a_vmm_need_not_keep_its_descriptors() {
    if !can_run("a_vmm_need_not_keep_its_descriptors") {
        return;
    }
    let vmm = Vmm::new(TrapMode::Auto);
    let vm = KvmVm::new(vm_fd(&vmm.vm)).unwrap();
    let vcpu = {
        let fd = vmm.vm.create_vcpu(0).unwrap();
        KvmVcpu::new(vcpu_fd(&fd), &vm, VcpuId(0)).unwrap()
    };
    vcpu.get_regs().unwrap();
}

/// KVM's own vPMU is there, and goes no more once there is a vCPU. (A KVM that has none is asked in
/// that one's place; it then refuses in the same way.)
#[test]
fn a_vpmu_that_stays_is_an_error() {
    /// KVM_CHECK_EXTENSION.
    const ASKS: Call = Call::Ioctl(0xae03);
    if !can_run("a_vpmu_that_stays_is_an_error") {
        return;
    }
    let has_one = |call, cap| {
        let is_asked = call == ASKS && cap == u64::from(KVM_CAP_PMU_CAPABILITY);
        is_asked.then_some(1)
    };
    let vmm = Vmm::new(TrapMode::Auto);
    let vm = KvmVm::new(vm_fd(&vmm.vm)).unwrap();
    let _vcpu = vmm.vm.create_vcpu(0).unwrap();
    if let Some((off, calls)) = sys::answered(has_one, || switch_off_vpmu(&vm)) {
        assert_eq!(off, Err(SetupError::VpmuStays(Errno(libc::EINVAL))));
        assert!(calls.contains(&ASKS), "{calls:?}");
        let told = off.unwrap_err().to_string();
        assert!(told.starts_with("switch_off_vpmu: KVM_CAP_PMU_CAPABILITY failed: "));
        assert!(told.ends_with("(a vCPU may be there already)"), "{told}");
    } else {
        println!("partly skipped: this kernel announces no system calls");
    }
    // A KVM that does not answer at all has not said that it has none.
    let dead = || switch_off_vpmu(&vm) == Err(SetupError::VpmuStays(Errno(libc::EIO)));
    assert!(sys::in_a_child(dead));
}
