// Package containerspec converts CRI requests to requests for keelson-oci: the OCI specification of
// a container with its mounts, devices, security profiles and resources.
package containerspec

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

// Input holds all inputs of a container's spec.
type Input struct {
	ID          string
	Sandbox     *cri.PodSandboxConfig
	Config      *cri.ContainerConfig
	Image       agent.ImageConfig
	Root        agent.RootFS
	Host        Host
	Cgroup      string // path from the root of the hierarchies
	Controllers Controllers

	NetNS     string // path; "" = the host's
	Pause     string // "/proc/PID/ns/" of the pause process
	TargetPID string // path of the PID namespace to join, in the mode TARGET
	Dirs      Directories

	ClampedOOM bool // set by BuildRequest: oom_score_adj could not be as low as requested
}

// Controllers are the optional cgroup controllers that the kernel has.
type Controllers struct {
	Pids, Memory, Hugetlb bool
}

// Directories are the directories from which a container gets files.
type Directories struct {
	Etc     string   // directory of the sandbox's resolv.conf, hostname and hosts
	Sandbox string   // directory of the sandbox's shm
	Seccomp string   // directory of Localhost profiles
	Volumes string   // directory for the image's volumes
	CDI     []string // directories of CDI specifications; later directories take precedence
}

func (in *Input) securityContext() *cri.LinuxContainerSecurityContext {
	return in.Config.GetLinux().GetSecurityContext()
}

func (in *Input) isPrivileged() bool { return in.securityContext().GetPrivileged() }

// HasOwnPIDNamespace reports whether the container has its own PID namespace, so that all its
// processes end with the first.
func (in *Input) HasOwnPIDNamespace() bool {
	return in.securityContext().GetNamespaceOptions().GetPid() == cri.NamespaceMode_CONTAINER
}

// StopSignal returns the number of the container's stop signal: the request's, else the image's,
// else SIGTERM.
func (in *Input) StopSignal() int {
	if s := in.Config.GetStopSignal(); s != cri.Signal_SIGNAL_RUNTIME_DEFAULT {
		return parseSignal(strings.TrimPrefix(s.String(), "SIGNAL_"))
	}
	return parseSignal(in.Image.StopSignal)
}

// SignalToCRI converts the number of a signal to CRI. It returns SIGNAL_RUNTIME_DEFAULT for a
// signal that CRI does not have.
func SignalToCRI(number int) cri.Signal {
	name := unix.SignalName(unix.Signal(number))
	switch {
	case number == rtMin:
		name = "SIGRTMIN"
	case number == rtMax:
		name = "SIGRTMAX"
	case number > rtMin && number <= rtMin+15:
		name = "SIGRTMINPLUS" + strconv.Itoa(number-rtMin)
	case number > rtMin && number < rtMax:
		name = "SIGRTMAXMINUS" + strconv.Itoa(rtMax-number)
	}
	return cri.Signal(cri.Signal_value["SIGNAL_"+name])
}

// Numbers of the first and the last real-time signal.
const rtMin, rtMax = 34, 64

// parseSignal parses "SIGTERM", "TERM", "15" or "SIGRTMIN+3". It returns SIGTERM for anything
// else.
func parseSignal(name string) int {
	if n, err := strconv.Atoi(name); err == nil && n > 0 && n < 65 {
		return n
	}
	name = "SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG")
	name = strings.NewReplacer("RTMINPLUS", "RTMIN+", "RTMAXMINUS", "RTMAX-").Replace(name)
	if n := unix.SignalNum(name); n != 0 {
		return int(n)
	}
	if rest, ok := strings.CutPrefix(name, "SIGRTMIN"); ok {
		if n, err := strconv.Atoi("0" + strings.TrimPrefix(rest, "+")); err == nil && rtMin+n <= rtMax {
			return rtMin + n
		}
	}
	if rest, ok := strings.CutPrefix(name, "SIGRTMAX"); ok {
		if n, err := strconv.Atoi("0" + strings.TrimPrefix(rest, "-")); err == nil && rtMax-n >= rtMin {
			return rtMax - n
		}
	}
	return int(unix.SIGTERM)
}

// BuildRequest returns the request for keelson-oci. It reads no state except the input, and the
// devices and profiles that the input names.
func (in *Input) BuildRequest() (*bundle.Create, error) {
	process, err := in.buildProcess()
	if err != nil {
		return nil, err
	}
	b := &bundle.Create{ID: in.ID, User: in.requestedUser(), Spec: &specs.Spec{
		Version: specs.Version,
		Process: process,
		Root:    &specs.Root{Path: in.Root.Path, Readonly: in.securityContext().GetReadonlyRootfs()},
		Linux:   &specs.Linux{CgroupsPath: in.Cgroup},
		// for OCI hooks, which receive them
		Annotations: in.Config.GetAnnotations(),
	}}
	if !in.Root.Mounted {
		b.Overlay = &bundle.Overlay{Lower: in.Root.Lower, Upper: in.Root.Upper, Work: in.Root.Work}
	}
	if err := in.addMounts(b); err != nil {
		return nil, err
	}
	if b.Spec.Linux.Namespaces, err = in.buildNamespaces(); err != nil {
		return nil, err
	}
	if b.Spec.Linux.Resources, err = in.buildResources(); err != nil {
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

func (in *Input) requestedUser() bundle.User {
	sc := in.securityContext()
	u := bundle.User{Name: sc.GetRunAsUsername(), Image: in.Image.User, Groups: sc.GetSupplementalGroups(),
		Strict: sc.GetSupplementalGroupsPolicy() == cri.SupplementalGroupsPolicy_Strict}
	if v := sc.GetRunAsUser(); v != nil {
		u.ID = &v.Value
	}
	if v := sc.GetRunAsGroup(); v != nil {
		u.Group = &v.Value
	}
	return u
}

func (in *Input) buildProcess() (*specs.Process, error) {
	args, err := in.commandLine()
	if err != nil {
		return nil, err
	}
	caps, err := in.buildCapabilities()
	if err != nil {
		return nil, err
	}
	p := &specs.Process{Terminal: in.Config.GetTty(), Args: args, Env: in.environment(), Cwd: in.Config.GetWorkingDir(),
		Capabilities: caps, NoNewPrivileges: in.securityContext().GetNoNewPrivs()}
	if p.Cwd == "" {
		p.Cwd = in.Image.WorkingDir
	}
	if p.Cwd == "" {
		p.Cwd = "/"
	}
	if !filepath.IsAbs(p.Cwd) {
		return nil, fmt.Errorf("working directory %q is not absolute", p.Cwd)
	}
	const files = 1 << 20
	p.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: min(files, in.Host.maxFiles),
		Hard: min(files, in.Host.maxFiles)}}
	if res := in.Config.GetLinux().GetResources(); res != nil {
		adj := int(res.OomScoreAdj)
		if !in.Host.LowerOOM && adj < in.Host.OOMScoreAdj {
			adj, in.ClampedOOM = in.Host.OOMScoreAdj, true
		}
		p.OOMScoreAdj = &adj
	}
	return p, nil
}

// commandLine returns the command line by the rules of CRI. A command replaces the image's
// entrypoint and drops its arguments. Arguments alone replace the image's arguments.
func (in *Input) commandLine() ([]string, error) {
	command, args := in.Config.GetCommand(), in.Config.GetArgs()
	if len(command) == 0 {
		command = in.Image.Entrypoint
		if len(args) == 0 {
			args = in.Image.Cmd
		}
	}
	argv := slices.Concat(command, args)
	if len(argv) == 0 || argv[0] == "" {
		return nil, errors.New("no command: neither the container nor the image specifies one")
	}
	return argv, nil
}

// environment returns the image's environment, overridden by the request's.
func (in *Input) environment() []string {
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
	if h := in.Sandbox.GetHostname(); h != "" {
		set("HOSTNAME=" + h)
	}
	if in.Config.GetTty() {
		set("TERM=xterm")
	}
	for _, kv := range in.Image.Env {
		set(kv)
	}
	for _, kv := range in.Config.GetEnvs() {
		set(kv.GetKey() + "=" + string(kv.GetValue()))
	}
	return env
}

// defaultCaps are the capabilities of an unprivileged container.
var defaultCaps = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// buildCapabilities returns the capabilities of the container: the default set (all capabilities
// for a privileged container) with the request's changes. It applies "ALL" before single names. It
// omits capabilities that this process lacks.
func (in *Input) buildCapabilities() (*specs.LinuxCapabilities, error) {
	set := map[string]bool{}
	start := defaultCaps
	if in.isPrivileged() {
		start = in.Host.caps
	}
	for _, c := range start {
		set[c] = true
	}
	change := func(names []string, granted bool) error {
		for _, n := range names {
			if strings.EqualFold(n, "ALL") || strings.EqualFold(n, "CAP_ALL") {
				for _, c := range capabilityNames {
					set[c] = granted
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
			set[name] = granted
		}
		return nil
	}
	c := in.securityContext().GetCapabilities()
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
		if set[n] && slices.Contains(in.Host.caps, n) {
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
	return &specs.LinuxCapabilities{Bounding: held, Effective: held, Permitted: held, Inheritable: ambient,
		Ambient: ambient}, nil
}

func (in *Input) buildNamespaces() ([]specs.LinuxNamespace, error) {
	ns := []specs.LinuxNamespace{{Type: specs.MountNamespace}}
	opt := in.securityContext().GetNamespaceOptions()
	if in.NetNS != "" {
		ns = append(ns, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: in.NetNS},
			specs.LinuxNamespace{Type: specs.UTSNamespace, Path: in.Pause + "uts"})
	}
	if in.Sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions().GetIpc() != cri.NamespaceMode_NODE {
		ns = append(ns, specs.LinuxNamespace{Type: specs.IPCNamespace, Path: in.Pause + "ipc"})
	}
	switch opt.GetPid() {
	case cri.NamespaceMode_CONTAINER:
		ns = append(ns, specs.LinuxNamespace{Type: specs.PIDNamespace})
	case cri.NamespaceMode_POD:
		if in.Sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions().GetPid() != cri.NamespaceMode_POD {
			return nil, errors.New("the sandbox has no process namespace to share")
		}
		ns = append(ns, specs.LinuxNamespace{Type: specs.PIDNamespace, Path: in.Pause + "pid"})
	case cri.NamespaceMode_TARGET:
		if in.TargetPID == "" {
			return nil, errors.New("the target container has no process namespace to join")
		}
		ns = append(ns, specs.LinuxNamespace{Type: specs.PIDNamespace, Path: in.TargetPID})
	}
	if in.Host.unified && !in.isPrivileged() {
		ns = append(ns, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	return ns, nil
}

func (in *Input) buildResources() (*specs.LinuxResources, error) {
	out := &specs.LinuxResources{}
	res := in.Config.GetLinux().GetResources()
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
		if in.Host.HasSwapAccounting() {
			out.Memory.Swap = &swap
		}
	}
	if in.Controllers.Hugetlb {
		for _, h := range res.HugepageLimits {
			out.HugepageLimits = append(out.HugepageLimits,
				specs.LinuxHugepageLimit{Pagesize: h.PageSize, Limit: h.Limit})
		}
	}
	if in.Host.unified {
		out.Unified = in.unifiedValues(res)
	} else if v, ok := res.Unified["pids.max"]; ok && in.Controllers.Pids && v != "max" {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("pids.max %q is not a number", v)
		}
		out.Pids = &specs.LinuxPids{Limit: &n}
	}
	return out, nil
}

// unifiedValues returns the values of cgroup v2 files. Files of a controller that the kernel lacks
// are omitted.
func (in *Input) unifiedValues(res *cri.LinuxContainerResources) map[string]string {
	out := map[string]string{}
	for k, v := range res.Unified {
		switch controller, _, _ := strings.Cut(k, "."); {
		case controller == "pids" && !in.Controllers.Pids, controller == "memory" && !in.Controllers.Memory:
		default:
			out[k] = v
		}
	}
	// In cgroup v2, memory and swap have separate limits. A container without a memory limit gets
	// no swap unless requested.
	if _, specified := out[SwapMax]; !specified && in.Host.SwapFile && res.MemoryLimitInBytes <= 0 {
		out[SwapMax] = "0"
	}
	return out
}

// SwapMax is the cgroup v2 file that limits swap. It does not exist on a kernel without swap.
const SwapMax = "memory.swap.max"

// HasSwapAccounting reports whether the kernel can limit the memory and swap of a cgroup together.
func (h Host) HasSwapAccounting() bool {
	if h.unified {
		return true
	}
	_, err := os.Stat("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes")
	return err == nil
}
