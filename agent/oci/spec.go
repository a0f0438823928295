package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/bundle"
)

// specInput holds all inputs of a container's spec.
type specInput struct {
	id         string
	sandbox    *cri.PodSandboxConfig
	config     *cri.ContainerConfig
	image      agent.ImageConfig
	root       agent.RootFS
	host       hostFacts
	cgroup     string // path from the root of the hierarchies
	hasPids    bool
	hasMemory  bool
	hasHugetlb bool

	netns        string   // path; "" = the host's
	pause        string   // "/proc/PID/ns/" of the pause process
	targetPID    int      // a process in the PID namespace to join
	etc          string   // directory with resolv.conf, hostname, hosts
	sandboxFiles string   // directory with shm
	seccompDir   string   // directory of Localhost profiles
	volumes      string   // directory for the image's volumes
	cdi          []string // directories of CDI specifications; later ones take precedence

	clampedOOM bool // set by build: oom_score_adj could not be as low as requested
}

func (in *specInput) security() *cri.LinuxContainerSecurityContext {
	return in.config.GetLinux().GetSecurityContext()
}

func (in *specInput) privileged() bool { return in.security().GetPrivileged() }

// ownPID reports whether the container has its own PID namespace, so that all its processes end
// with the first.
func (in *specInput) ownPID() bool {
	return in.security().GetNamespaceOptions().GetPid() == cri.NamespaceMode_CONTAINER
}

// stopSignal returns the number of the container's stop signal: the request's, else the image's,
// else SIGTERM.
func (in *specInput) stopSignal() int {
	if s := in.config.GetStopSignal(); s != cri.Signal_SIGNAL_RUNTIME_DEFAULT {
		return signalNumber(strings.TrimPrefix(s.String(), "SIGNAL_"))
	}
	return signalNumber(in.image.StopSignal)
}

// signalNumber parses "SIGTERM", "TERM", "15" or "SIGRTMIN+3". It returns SIGTERM for anything
// else.
func signalNumber(name string) int {
	if n, err := strconv.Atoi(name); err == nil && n > 0 && n < 65 {
		return n
	}
	name = "SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG")
	name = strings.NewReplacer("RTMINPLUS", "RTMIN+", "RTMAXMINUS", "RTMAX-").Replace(name)
	if n := unix.SignalNum(name); n != 0 {
		return int(n)
	}
	const rtmin, rtmax = 34, 64
	if rest, ok := strings.CutPrefix(name, "SIGRTMIN"); ok {
		if n, err := strconv.Atoi("0" + strings.TrimPrefix(rest, "+")); err == nil && rtmin+n <= rtmax {
			return rtmin + n
		}
	}
	if rest, ok := strings.CutPrefix(name, "SIGRTMAX"); ok {
		if n, err := strconv.Atoi("0" + strings.TrimPrefix(rest, "-")); err == nil && rtmax-n >= rtmin {
			return rtmax - n
		}
	}
	return int(unix.SIGTERM)
}

// build returns the request for keelson-oci. It reads no state except the input and the devices and
// profiles in it.
func (in *specInput) build() (*bundle.Create, error) {
	process, err := in.process()
	if err != nil {
		return nil, err
	}
	b := &bundle.Create{ID: in.id, User: in.user(), Spec: &specs.Spec{
		Version: specs.Version,
		Process: process,
		Root:    &specs.Root{Path: in.root.Path, Readonly: in.security().GetReadonlyRootfs()},
		Linux:   &specs.Linux{CgroupsPath: in.cgroup},
		// for OCI hooks, which receive them
		Annotations: in.config.GetAnnotations(),
	}}
	if !in.root.Mounted {
		b.Overlay = &bundle.Overlay{Lower: in.root.Lower, Upper: in.root.Upper, Work: in.root.Work}
	}
	if err := in.addMounts(b); err != nil {
		return nil, err
	}
	if b.Spec.Linux.Namespaces, err = in.namespaces(); err != nil {
		return nil, err
	}
	if b.Spec.Linux.Resources, err = in.resources(); err != nil {
		return nil, err
	}
	if err := in.addDevices(b.Spec.Linux); err != nil {
		return nil, err
	}
	if err := in.addProfiles(b); err != nil {
		return nil, err
	}
	return b, in.addCDI(b.Spec)
}

func (in *specInput) user() bundle.User {
	sc := in.security()
	u := bundle.User{Name: sc.GetRunAsUsername(), Image: in.image.User, Groups: sc.GetSupplementalGroups(),
		Strict: sc.GetSupplementalGroupsPolicy() == cri.SupplementalGroupsPolicy_Strict}
	if v := sc.GetRunAsUser(); v != nil {
		u.ID = &v.Value
	}
	if v := sc.GetRunAsGroup(); v != nil {
		u.Group = &v.Value
	}
	return u
}

func (in *specInput) process() (*specs.Process, error) {
	args, err := in.args()
	if err != nil {
		return nil, err
	}
	caps, err := in.capabilities()
	if err != nil {
		return nil, err
	}
	p := &specs.Process{Terminal: in.config.GetTty(), Args: args, Env: in.env(), Cwd: in.config.GetWorkingDir(), Capabilities: caps,
		NoNewPrivileges: in.security().GetNoNewPrivs()}
	if p.Cwd == "" {
		p.Cwd = in.image.WorkingDir
	}
	if p.Cwd == "" {
		p.Cwd = "/"
	}
	if !filepath.IsAbs(p.Cwd) {
		return nil, fmt.Errorf("working directory %q is not absolute", p.Cwd)
	}
	const files = 1 << 20
	p.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: min(files, in.host.maxFiles), Hard: min(files, in.host.maxFiles)}}
	if res := in.config.GetLinux().GetResources(); res != nil {
		adj := int(res.OomScoreAdj)
		if !in.host.lowerOOM && adj < in.host.oomScoreAdj {
			adj, in.clampedOOM = in.host.oomScoreAdj, true
		}
		p.OOMScoreAdj = &adj
	}
	return p, nil
}

// args returns the command line by the rules of CRI. A command replaces the image's entrypoint and
// drops its arguments. Arguments alone replace the image's arguments.
func (in *specInput) args() ([]string, error) {
	command, args := in.config.GetCommand(), in.config.GetArgs()
	if len(command) == 0 {
		command = in.image.Entrypoint
		if len(args) == 0 {
			args = in.image.Cmd
		}
	}
	all := slices.Concat(command, args)
	if len(all) == 0 || all[0] == "" {
		return nil, errors.New("no command: neither the container nor the image names one")
	}
	return all, nil
}

// env returns the image's environment, overridden by the request's.
func (in *specInput) env() []string {
	var env []string
	at := map[string]int{}
	set := func(kv string) {
		name, _, _ := strings.Cut(kv, "=")
		if i, ok := at[name]; ok {
			env[i] = kv
			return
		}
		at[name] = len(env)
		env = append(env, kv)
	}
	set("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	if h := in.sandbox.GetHostname(); h != "" {
		set("HOSTNAME=" + h)
	}
	if in.config.GetTty() {
		set("TERM=xterm")
	}
	for _, kv := range in.image.Env {
		set(kv)
	}
	for _, kv := range in.config.GetEnvs() {
		set(kv.GetKey() + "=" + string(kv.GetValue()))
	}
	return env
}

// defaultCaps are the capabilities of an unprivileged container.
var defaultCaps = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// capabilities returns the default set (all for a privileged container), changed by the request.
// "ALL" applies before single names. Capabilities that this process lacks are omitted.
func (in *specInput) capabilities() (*specs.LinuxCapabilities, error) {
	set := map[string]bool{}
	start := defaultCaps
	if in.privileged() {
		start = in.host.caps
	}
	for _, c := range start {
		set[c] = true
	}
	change := func(names []string, to bool) error {
		for _, n := range names {
			if strings.EqualFold(n, "ALL") || strings.EqualFold(n, "CAP_ALL") {
				for _, c := range capabilityNames {
					set[c] = to
				}
			}
		}
		for _, n := range names {
			name := "CAP_" + strings.TrimPrefix(strings.ToUpper(n), "CAP_")
			if name == "CAP_ALL" {
				continue
			}
			if !slices.Contains(capabilityNames, name) {
				return fmt.Errorf("unknown capability %q", n)
			}
			set[name] = to
		}
		return nil
	}
	c := in.security().GetCapabilities()
	add, drop := slices.Concat(c.GetAddCapabilities(), c.GetAddAmbientCapabilities()), c.GetDropCapabilities()
	// Both "drop ALL, add X" and "add ALL, drop X" must work: apply the side with ALL first.
	order := []func() error{func() error { return change(drop, false) }, func() error { return change(add, true) }}
	if slices.ContainsFunc(add, func(n string) bool { return strings.EqualFold(n, "ALL") }) {
		slices.Reverse(order)
	}
	for _, f := range order {
		if err := f(); err != nil {
			return nil, err
		}
	}
	var held []string
	for _, n := range capabilityNames {
		if set[n] && slices.Contains(in.host.caps, n) {
			held = append(held, n)
		}
	}
	var ambient []string
	for _, n := range c.GetAddAmbientCapabilities() {
		name := "CAP_" + strings.TrimPrefix(strings.ToUpper(n), "CAP_")
		if slices.Contains(held, name) {
			ambient = append(ambient, name)
		}
	}
	return &specs.LinuxCapabilities{Bounding: held, Effective: held, Permitted: held, Inheritable: ambient, Ambient: ambient}, nil
}

func (in *specInput) namespaces() ([]specs.LinuxNamespace, error) {
	ns := []specs.LinuxNamespace{{Type: specs.MountNamespace}}
	opt := in.security().GetNamespaceOptions()
	if in.netns != "" {
		ns = append(ns, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: in.netns},
			specs.LinuxNamespace{Type: specs.UTSNamespace, Path: in.pause + "uts"})
	}
	if in.sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions().GetIpc() != cri.NamespaceMode_NODE {
		ns = append(ns, specs.LinuxNamespace{Type: specs.IPCNamespace, Path: in.pause + "ipc"})
	}
	switch opt.GetPid() {
	case cri.NamespaceMode_CONTAINER:
		ns = append(ns, specs.LinuxNamespace{Type: specs.PIDNamespace})
	case cri.NamespaceMode_POD:
		if in.sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions().GetPid() != cri.NamespaceMode_POD {
			return nil, errors.New("the sandbox has no process namespace to share")
		}
		ns = append(ns, specs.LinuxNamespace{Type: specs.PIDNamespace, Path: in.pause + "pid"})
	case cri.NamespaceMode_TARGET:
		ns = append(ns, specs.LinuxNamespace{Type: specs.PIDNamespace, Path: fmt.Sprintf("/proc/%d/ns/pid", in.targetPID)})
	}
	if in.host.unified && !in.privileged() {
		ns = append(ns, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	return ns, nil
}

func (in *specInput) resources() (*specs.LinuxResources, error) {
	out := &specs.LinuxResources{}
	res := in.config.GetLinux().GetResources()
	if res == nil {
		return out, nil
	}
	cpu := &specs.LinuxCPU{Cpus: res.CpusetCpus, Mems: res.CpusetMems}
	if res.CpuShares > 0 {
		shares := uint64(res.CpuShares)
		cpu.Shares = &shares
	}
	if res.CpuQuota != 0 {
		cpu.Quota = &res.CpuQuota
	}
	if res.CpuPeriod > 0 {
		period := uint64(res.CpuPeriod)
		cpu.Period = &period
	}
	out.CPU = cpu
	if res.MemoryLimitInBytes > 0 {
		out.Memory = &specs.LinuxMemory{Limit: &res.MemoryLimitInBytes}
		// Without a swap limit, memory plus swap is limited to the memory limit: no swap. A kernel
		// without swap accounting has no file for the limit.
		swap := res.MemoryLimitInBytes
		if res.MemorySwapLimitInBytes != 0 {
			swap = res.MemorySwapLimitInBytes
		}
		if in.host.swapAccounting() {
			out.Memory.Swap = &swap
		}
	}
	if in.hasHugetlb {
		for _, h := range res.HugepageLimits {
			out.HugepageLimits = append(out.HugepageLimits, specs.LinuxHugepageLimit{Pagesize: h.PageSize, Limit: h.Limit})
		}
	}
	if in.host.unified {
		out.Unified = in.unified(res)
	} else if v, ok := res.Unified["pids.max"]; ok && in.hasPids && v != "max" {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("pids.max %q is not a number", v)
		}
		out.Pids = &specs.LinuxPids{Limit: &n}
	}
	return out, nil
}

// unified returns the values of cgroup v2 files. Files of a controller that the kernel lacks are
// omitted.
func (in *specInput) unified(res *cri.LinuxContainerResources) map[string]string {
	out := map[string]string{}
	for k, v := range res.Unified {
		switch controller, _, _ := strings.Cut(k, "."); {
		case controller == "pids" && !in.hasPids, controller == "memory" && !in.hasMemory:
		default:
			out[k] = v
		}
	}
	// In cgroup v2, memory and swap have separate limits. A container without a memory limit gets
	// no swap unless requested.
	if _, said := out[swapMax]; !said && in.host.swapFile && res.MemoryLimitInBytes <= 0 {
		out[swapMax] = "0"
	}
	return out
}

// swapMax is the cgroup v2 file that limits swap. It does not exist on a kernel without swap.
const swapMax = "memory.swap.max"

// swapAccounting reports whether memory plus swap can be limited.
func (h hostFacts) swapAccounting() bool {
	if h.unified {
		return true
	}
	_, err := os.Stat("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes")
	return err == nil
}
