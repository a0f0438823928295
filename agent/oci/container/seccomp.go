//go:build linux

package container

import (
	"runtime"
	"slices"
	"strings"

	"github.com/opencontainers/runc/libcontainer/configs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// The runtime's default seccomp profile allows the system calls of ordinary programs. All others
// fail with EPERM. System calls with effects outside the container are allowed if the container has
// the capability that guards them: mounts, modules, clocks, tracing, BPF, keys, other processes'
// memory. A granted capability therefore needs no change of the profile.

// allowedSyscalls are the system calls that are always allowed, by purpose.
var allowedSyscalls = []string{
	// files and directories
	`access chdir chmod chown chown32 close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2
	fadvise64 fadvise64_64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync
	fgetxattr file_getattr file_setattr flistxattr flock fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate
	ftruncate64 futimesat getcwd getdents getdents64 getxattr getxattrat ioctl lchown lchown32 lgetxattr link linkat listmount listxattr
	listxattrat llistxattr _llseek lremovexattr lseek lsetxattr lstat lstat64 mkdir mkdirat mknod mknodat name_to_handle_at
	newfstatat _newselect open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink
	readlinkat readv removexattr removexattrat rename renameat renameat2 rmdir sendfile sendfile64 setxattr setxattrat splice stat stat64
	statfs statfs64 statmount statx symlink symlinkat sync sync_file_range sync_file_range2 arm_sync_file_range syncfs tee truncate truncate64
	umask unlink unlinkat utime utimensat utimensat_time64 utimes vmsplice write writev cachestat`,
	// event notification
	`epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2
	fanotify_mark inotify_add_watch inotify_init inotify_init1 inotify_rm_watch poll ppoll ppoll_time64 pselect6
	pselect6_time64 select signalfd signalfd4`,
	// asynchronous I/O; io_uring is omitted because it bypasses this filter
	`io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup io_submit ioprio_get ioprio_set`,
	// memory
	`brk madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mlock mlock2 mlockall mmap mmap2 mprotect mremap
	mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect process_mrelease remap_file_pages`,
	// processes and threads; clone is allowed conditionally below
	`arch_prctl capget capset execve execveat exit exit_group fork futex futex_requeue futex_time64 futex_wait
	futex_waitv futex_wake get_robust_list get_thread_area getcpu getegid getegid32 geteuid geteuid32 getgid getgid32
	getgroups getgroups32 getpgid getpgrp getpid getppid getpriority getresgid getresgid32 getresuid getresuid32
	getrlimit getrusage getsid gettid getuid getuid32 kill landlock_add_rule landlock_create_ruleset
	landlock_restrict_self modify_ldt pause pidfd_open pidfd_send_signal prctl prlimit64 restart_syscall rseq
	sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
	sched_rr_get_interval sched_rr_get_interval_time64 sched_setaffinity sched_setattr sched_setparam
	sched_setscheduler sched_yield seccomp set_robust_list set_thread_area set_tid_address setfsgid setfsgid32
	setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setpgid setpriority setregid setregid32 setresgid
	setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit setsid setuid setuid32 sysinfo tgkill times tkill
	ugetrlimit uname vfork wait4 waitid waitpid cacheflush set_tls breakpoint lsm_get_self_attr lsm_list_modules lsm_set_self_attr`,
	// signals
	`rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
	rt_sigtimedwait_time64 rt_tgsigqueueinfo sigaltstack sigprocmask sigreturn`,
	// time
	`alarm clock_getres clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep clock_nanosleep_time64
	getitimer gettimeofday nanosleep setitimer time timer_create timer_delete timer_getoverrun timer_gettime
	timer_gettime64 timer_settime timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime
	timerfd_settime64 adjtimex clock_adjtime clock_adjtime64`,
	// sockets and pipes; socket is allowed below, except AF_VSOCK
	`accept accept4 bind connect getpeername getsockname getsockopt listen pipe pipe2 recv recvfrom recvmmsg
	recvmmsg_time64 recvmsg send sendmmsg sendmsg sendto setsockopt shutdown socketcall socketpair`,
	// System V and POSIX IPC
	`ipc mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64
	mq_unlink msgctl msgget msgrcv msgsnd semctl semget semop semtimedop semtimedop_time64 shmat shmctl shmdt shmget`,
	// others
	`getrandom process_madvise ptrace process_vm_readv process_vm_writev`,
}

// syscallsByCapability lists the system calls that are allowed only for a process with a
// capability, by capability.
var syscallsByCapability = map[string]string{
	"CAP_DAC_READ_SEARCH": `open_by_handle_at`,
	"CAP_SYS_ADMIN": `bpf clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie mount mount_setattr
	move_mount open_tree open_tree_attr perf_event_open quotactl quotactl_fd setdomainname sethostname setns syslog umount umount2 unshare`,
	"CAP_SYS_BOOT":       `reboot`,
	"CAP_SYS_CHROOT":     `chroot pivot_root`,
	"CAP_SYS_MODULE":     `delete_module init_module finit_module`,
	"CAP_SYS_PACCT":      `acct`,
	"CAP_SYS_PTRACE":     `kcmp pidfd_getfd`,
	"CAP_SYS_RAWIO":      `iopl ioperm`,
	"CAP_SYS_TIME":       `settimeofday stime clock_settime clock_settime64`,
	"CAP_SYS_TTY_CONFIG": `vhangup`,
	"CAP_SYS_NICE":       `get_mempolicy mbind set_mempolicy set_mempolicy_home_node`,
	"CAP_SYSLOG":         `syslog`,
	"CAP_BPF":            `bpf`,
	"CAP_PERFMON":        `perf_event_open`,
}

// cloneNamespaces are the flags of clone that create namespaces.
const cloneNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER |
	unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP

// defaultSeccomp returns the default profile for a process with these capabilities.
func defaultSeccomp(caps *specs.LinuxCapabilities) *configs.Seccomp {
	eperm, enosys := uint(unix.EPERM), uint(unix.ENOSYS)
	s := &configs.Seccomp{DefaultAction: configs.Errno, DefaultErrnoRet: &eperm}
	if runtime.GOARCH == "amd64" {
		s.Architectures = []string{"amd64", "x86"}
	}
	allow := func(names string) {
		for _, n := range strings.Fields(names) {
			s.Syscalls = append(s.Syscalls, &configs.Syscall{Name: n, Action: configs.Allow})
		}
	}
	for _, group := range allowedSyscalls {
		allow(group)
	}
	var held []string
	if caps != nil {
		held = caps.Bounding
	}
	done := map[string]bool{}
	for _, c := range held {
		for _, n := range strings.Fields(syscallsByCapability[c]) {
			if !done[n] {
				done[n] = true
				allow(n)
			}
		}
	}
	if slices.Contains(held, "CAP_SYS_ADMIN") {
		allow("clone")
	} else {
		s.Syscalls = append(s.Syscalls,
			&configs.Syscall{Name: "clone", Action: configs.Allow, Args: []*configs.Arg{
				{Index: 0, Value: cloneNamespaces, ValueTwo: 0, Op: configs.MaskEqualTo}}},
			// The filter cannot inspect the flags of clone3; with ENOSYS, C libraries fall back to
			// clone.
			&configs.Syscall{Name: "clone3", Action: configs.Errno, ErrnoRet: &enosys})
	}
	s.Syscalls = append(s.Syscalls,
		&configs.Syscall{Name: "socket", Action: configs.Allow, Args: []*configs.Arg{
			{Index: 0, Value: unix.AF_VSOCK, Op: configs.NotEqualTo}}})
	// 0: Linux; 8: 32-bit Linux; 0x20000: UNAME26; 0x20008: both; all ones: query only.
	for _, v := range []uint64{0, 8, 0x20000, 0x20008, 0xffffffff} {
		s.Syscalls = append(s.Syscalls, &configs.Syscall{Name: "personality", Action: configs.Allow,
			Args: []*configs.Arg{{Index: 0, Value: v, Op: configs.EqualTo}}})
	}
	return s
}
