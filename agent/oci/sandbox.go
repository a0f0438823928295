package oci

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/api/resource"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/wire"
	"keelson.dev/keelson/internal/quantitytext"
	"keelson.dev/keelson/internal/saturate"
)

// sandbox is one pod's sandbox.
type sandbox struct {
	// life serializes the operations that change the sandbox: run, stop, remove. It is locked
	// before op.
	life sync.Mutex
	// op prevents teardown while a container is created in the sandbox: creators hold the read
	// lock, teardown holds the write lock.
	op sync.RWMutex

	etc    sync.Mutex    // guards the sandbox's /etc files
	rec    sandboxRecord // State, IPs and PausePID are guarded by Runtime.mu
	lost   bool          // guarded by Runtime.mu: pause or the shim ended before the sandbox was ready
	config *cri.PodSandboxConfig
	shim   *shimClient // guarded by Runtime.mu; nil if not connected
}

func (s *sandbox) namespaces() *cri.NamespaceOption {
	return s.config.GetLinux().GetSecurityContext().GetNamespaceOptions()
}

func (s *sandbox) hostNetwork() bool { return s.namespaces().GetNetwork() == cri.NamespaceMode_NODE }

// cgroup returns the pod's cgroup, relative to the runtime's root.
func (s *sandbox) cgroup() string {
	if p := s.config.GetLinux().GetCgroupParent(); p != "" {
		return filepath.Join("/", p)
	}
	return "/pod" + s.config.GetMetadata().GetUid()
}

func sandboxName(m *cri.PodSandboxMetadata) string {
	return fmt.Sprintf("%s/%s/%s/%d", m.GetNamespace(), m.GetName(), m.GetUid(), m.GetAttempt())
}

func (s *sandbox) networkRequest(r *Runtime) agent.NetworkRequest {
	m := s.config.GetMetadata()
	q := agent.NetworkRequest{SandboxID: s.rec.ID, NetNS: r.netnsPath(s.rec.ID), Namespace: m.GetNamespace(),
		Name: m.GetName(), UID: podUID(m.GetUid()), Ports: s.config.GetPortMappings()}
	q.Ingress = bandwidth(s.config.GetAnnotations()[ingressBandwidth])
	q.Egress = bandwidth(s.config.GetAnnotations()[egressBandwidth])
	return q
}

// The annotations that limit a pod's bandwidth in bits per second, and the range of their values,
// as in Kubernetes.
const (
	ingressBandwidth = "kubernetes.io/ingress-bandwidth"
	egressBandwidth  = "kubernetes.io/egress-bandwidth"
	leastBandwidth   = 1_000
	mostBandwidth    = 1_000_000_000_000_000
	maxQuantity      = 64 // bytes of an annotation
)

// checkBandwidth rejects invalid values of the bandwidth annotations.
func checkBandwidth(annotations map[string]string) error {
	for _, name := range []string{ingressBandwidth, egressBandwidth} {
		v, ok := annotations[name]
		if !ok {
			continue
		}
		q, err := parseQuantity(v)
		n := saturate.Value(&q)
		if err != nil || n < leastBandwidth || n > mostBandwidth {
			v = v[:min(len(v), maxQuantity)]
			return fmt.Errorf("annotation %s=%q: want bits a second, from 1k to 1P, such as 10M", name, v)
		}
	}
	return nil
}

// parseQuantity parses the value of an annotation. It rejects values that would take long to parse.
func parseQuantity(v string) (resource.Quantity, error) {
	if err := quantitytext.Check(v); err != nil || len(v) > maxQuantity {
		return resource.Quantity{}, cmp.Or(err, resource.ErrFormatWrong)
	}
	return resource.ParseQuantity(v)
}

// bandwidth returns the value of a checked bandwidth annotation; 0 if it is not set.
func bandwidth(v string) int64 {
	q, err := parseQuantity(v)
	if err != nil {
		return 0
	}
	return q.Value()
}

// RunPodSandbox implements agent.Runtime. A repeated request for a ready sandbox returns that
// sandbox.
func (r *Runtime) RunPodSandbox(ctx context.Context, q *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error) {
	return r.RunPodSandboxEarly(ctx, q, func(string) {})
}

// RunPodSandboxEarly implements agent.EarlyRuntime.
func (r *Runtime) RunPodSandboxEarly(ctx context.Context, q *cri.RunPodSandboxRequest, prepared func(id string)) (*cri.RunPodSandboxResponse, error) {
	if err := r.wait(ctx); err != nil {
		return nil, err
	}
	config := q.GetConfig()
	if err := checkSandboxConfig(config); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if err := checkBandwidth(config.GetAnnotations()); err != nil {
		return nil, err
	}
	if err := r.cfg.checkHandler(q.GetRuntimeHandler(), config.GetMetadata()); err != nil {
		return nil, err
	}
	data, err := proto.Marshal(config)
	if err != nil {
		return nil, err
	}
	s := &sandbox{config: config, rec: sandboxRecord{ID: newID(), State: SandboxCreating, Config: data, Handler: q.GetRuntimeHandler(),
		Created: time.Now().UnixNano(), Boot: bootID()}}
	s.life.Lock()
	defer s.life.Unlock()
	if existing := r.reserveSandbox(s); existing != nil {
		if res, err := r.sameSandbox(ctx, existing); res != nil || err != nil {
			return res, err
		}
		if r.reserveSandbox(s) != nil { // the old remains are gone, but another request was faster
			return nil, status.Errorf(codes.Aborted, "sandbox of pod %s/%s is being made by another request", config.Metadata.Namespace, config.Metadata.Name)
		}
	}
	if err := r.runSandboxSteps(ctx, s, prepared); err != nil {
		s.op.Lock() // containers may be being created
		defer s.op.Unlock()
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
		defer cancel()
		if e := r.dropSandbox(cleanup, s); e != nil {
			r.log.Error("a failed sandbox could not be removed; it is tried again", "sandbox", s.rec.ID, "error", e)
			r.dropLater(s)
		}
		return nil, fmt.Errorf("run sandbox for pod %s/%s: %w", config.Metadata.Namespace, config.Metadata.Name, err)
	}
	r.announce(agent.RuntimeEvent{SandboxID: s.rec.ID, PodUID: podUID(config.Metadata.Uid)})
	return &cri.RunPodSandboxResponse{PodSandboxId: s.rec.ID}, nil
}

const teardownTimeout = 30 * time.Second

// reserveSandbox registers s under its name and returns nil, or returns the sandbox that has the
// name.
func (r *Runtime) reserveSandbox(s *sandbox) *sandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	name := sandboxName(s.config.Metadata)
	if id, taken := r.names[name]; taken {
		return r.sandboxes[id]
	}
	r.names[name] = s.rec.ID
	r.sandboxes[s.rec.ID] = s
	return nil
}

// sameSandbox handles a repeated request: it returns the ready sandbox. It returns nil after it has
// removed the remains of a failed sandbox, so that the caller can create a new one.
func (r *Runtime) sameSandbox(ctx context.Context, existing *sandbox) (*cri.RunPodSandboxResponse, error) {
	existing.life.Lock() // wait until the first request has returned
	defer existing.life.Unlock()
	r.mu.Lock()
	state := existing.rec.State
	r.mu.Unlock()
	switch state {
	case SandboxReady:
		return &cri.RunPodSandboxResponse{PodSandboxId: existing.rec.ID}, nil
	case SandboxCreating, SandboxPrepared, SandboxRemoved:
		if err := r.dropHalf(ctx, existing); err != nil {
			return nil, fmt.Errorf("an earlier sandbox %s of that pod is still to be removed: %w", existing.rec.ID, err)
		}
		return nil, nil
	}
	return nil, status.Errorf(codes.AlreadyExists, "sandbox %s of that pod and attempt exists and is %s", existing.rec.ID, state)
}

// dropHalf removes a sandbox that was never ready. The caller holds its life.
func (r *Runtime) dropHalf(ctx context.Context, s *sandbox) error {
	s.op.Lock()
	defer s.op.Unlock()
	r.mu.Lock()
	half := s.rec.State == SandboxCreating || s.rec.State == SandboxPrepared
	r.mu.Unlock()
	if !half {
		return nil
	}
	return r.dropSandbox(ctx, s)
}

// dropLater retries in the background to remove the remains of a failed sandbox, which no caller
// knows.
func (r *Runtime) dropLater(s *sandbox) {
	const first, most = time.Second, time.Minute
	r.background.Go(func() {
		for pause := first; ; pause = min(2*pause, most) {
			select {
			case <-r.stopping:
				return // the next agent process removes sandboxes in that state
			case <-time.After(pause):
			}
			ctx, cancel := context.WithTimeout(context.Background(), teardownTimeout)
			s.life.Lock()
			err := r.dropHalf(ctx, s)
			s.life.Unlock()
			cancel()
			if err == nil {
				return
			}
		}
	})
}

func checkSandboxConfig(c *cri.PodSandboxConfig) error {
	m := c.GetMetadata()
	if m.GetName() == "" || m.GetNamespace() == "" || m.GetUid() == "" {
		return errors.New("sandbox metadata needs name, namespace and uid")
	}
	ns := c.GetLinux().GetSecurityContext().GetNamespaceOptions()
	if u := ns.GetUsernsOptions(); u != nil && u.Mode != cri.NamespaceMode_NODE {
		return errors.New("user namespaces (hostUsers: false) are not supported by this runtime")
	}
	if p := c.GetLinux().GetCgroupParent(); strings.Contains(p, "..") {
		return fmt.Errorf("cgroup parent %q leads out of its root", p)
	}
	for name := range c.GetLinux().GetSysctls() {
		if err := checkSysctl(name, ns); err != nil {
			return err
		}
	}
	return nil
}

// checkSysctl rejects a sysctl that is not confined to the pod's own namespaces.
func checkSysctl(name string, ns *cri.NamespaceOption) error {
	dotted := strings.ReplaceAll(name, "/", ".")
	switch {
	case strings.Contains(dotted, ".."):
		return fmt.Errorf("sysctl %q is malformed", name)
	case strings.HasPrefix(dotted, "net."):
		if ns.GetNetwork() == cri.NamespaceMode_NODE {
			return fmt.Errorf("sysctl %q is not allowed with the host's network", name)
		}
	case strings.HasPrefix(dotted, "kernel.shm"), strings.HasPrefix(dotted, "kernel.msg"), dotted == "kernel.sem", strings.HasPrefix(dotted, "fs.mqueue."):
		if ns.GetIpc() == cri.NamespaceMode_NODE {
			return fmt.Errorf("sysctl %q is not allowed with the host's IPC", name)
		}
	default:
		return fmt.Errorf("sysctl %q is not confined to a pod", name)
	}
	return nil
}

// runSandboxSteps creates the sandbox. The network is set up while the shim, cgroup and files are
// prepared. Pause starts as soon as the shim and the network namespace exist. prepared is called
// with the sandbox's ID when all but the network is ready.
func (r *Runtime) runSandboxSteps(ctx context.Context, s *sandbox, prepared func(id string)) error {
	id := s.rec.ID
	if err := os.Mkdir(r.sandboxDir(id), 0o711); err != nil {
		return err
	}
	if err := r.saveSandbox(&s.rec); err != nil {
		return err
	}
	stages := &stageList{}
	namespace := make(chan struct{})
	var net agent.NetworkStatus
	all, gctx := errgroup.WithContext(ctx)
	all.Go(func() error {
		if s.hostNetwork() {
			close(namespace)
			return nil
		}
		if err := stages.time("netns", func() error { return makeNetns(r.netnsPath(id)) }); err != nil {
			return err
		}
		close(namespace)
		return stages.time("cni", func() (err error) {
			net, err = r.cfg.Network.Add(gctx, s.networkRequest(r))
			return err
		})
	})
	var g errgroup.Group // everything except the network
	g.Go(func() error { return r.cgroups.make(s.cgroup(), r.cgroups.podResources(s.config)) })
	g.Go(func() error { return r.sandboxFiles(s) })
	g.Go(func() error {
		start := time.Now()
		if err := r.bearShim(gctx, s); err != nil {
			return err
		}
		select {
		case <-namespace:
		case <-gctx.Done():
			return gctx.Err()
		}
		if err := r.startPause(gctx, s); err != nil {
			return err
		}
		stages.add("pause", start)
		return nil
	})
	all.Go(func() error {
		if err := g.Wait(); err != nil {
			return err
		}
		if err := r.advance(s, SandboxBuilt, nil); err != nil {
			return err
		}
		prepared(id)
		return nil
	})
	if err := all.Wait(); err != nil {
		return err
	}
	if err := r.advance(s, SandboxRan, net.IPs); err != nil {
		return err
	}
	r.mu.Lock()
	rec := s.rec
	r.stages[id] = stages.list
	r.mu.Unlock()
	return r.saveSandbox(&rec)
}

// advance applies an input to a sandbox that is being created, unless its processes have already
// ended.
func (r *Runtime) advance(s *sandbox, in SandboxInput, ips []string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.lost {
		return errors.New("pause or the shim ended while the sandbox was being made")
	}
	next, err := s.rec.State.Next(in)
	if err != nil {
		return err
	}
	s.rec.State, s.rec.IPs = next, ips
	return nil
}

// bearShim starts the sandbox's shim and connects to it.
func (r *Runtime) bearShim(ctx context.Context, s *sandbox) error {
	pid, err := r.startShim(r.sandboxDir(s.rec.ID))
	if err != nil {
		return err
	}
	s.rec.ShimPID = pid
	c, _, err := connectShim(ctx, r.sandboxDir(s.rec.ID), func(e wire.Exited) { r.processEnded(s, e) }, func() { r.shimLost(s) })
	if err != nil {
		_ = unix.Kill(pid, unix.SIGKILL)
		return fmt.Errorf("connect to the shim: %w", err)
	}
	r.mu.Lock()
	s.shim = c
	r.mu.Unlock()
	return nil
}

func (r *Runtime) startPause(ctx context.Context, s *sandbox) error {
	ns := s.namespaces()
	m := wire.Pause{Root: r.pauseRoot(), Program: pauseProgram,
		NewIPC: ns.GetIpc() != cri.NamespaceMode_NODE,
		NewUTS: !s.hostNetwork(), // as in Kubernetes, the host's network implies the host's name
		NewPID: ns.GetPid() == cri.NamespaceMode_POD,
	}
	if m.NewUTS {
		m.Hostname = s.config.GetHostname()
	}
	if !s.hostNetwork() {
		m.NetNS = r.netnsPath(s.rec.ID)
	}
	for k, v := range s.config.GetLinux().GetSysctls() {
		m.Sysctls = append(m.Sysctls, k+"="+v)
	}
	f, err := s.shim.call(ctx, wire.KindPause, &m)
	if err != nil {
		return fmt.Errorf("start pause: %w", err)
	}
	st, err := s.shim.begun(f)
	if err != nil {
		return fmt.Errorf("start pause: %w", err)
	}
	r.mu.Lock()
	s.rec.PausePID = int(st.PID)
	r.mu.Unlock()
	return nil
}

// etcNames are the files of /etc that a sandbox provides to its containers.
var etcNames = []string{"resolv.conf", "hostname", "hosts"}

// sandboxFiles creates the sandbox's /etc files and mounts its shared /dev/shm.
func (r *Runtime) sandboxFiles(s *sandbox) error {
	if err := r.etcFiles(s); err != nil {
		return err
	}
	// The previous release expects the files here when it creates a container in the sandbox.
	for _, name := range etcNames {
		if err := os.Symlink(filepath.Join(r.etcDir(s.rec.ID), name),
			filepath.Join(r.sandboxDir(s.rec.ID), name)); err != nil {
			return err
		}
	}
	if s.namespaces().GetIpc() == cri.NamespaceMode_NODE {
		return nil
	}
	shm := filepath.Join(r.sandboxDir(s.rec.ID), "shm")
	if err := os.Mkdir(shm, 0o711); err != nil {
		return err
	}
	if err := unix.Mount("shm", shm, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC,
		"mode=1777,size=65536k"); err != nil {
		return fmt.Errorf("mount %s: %w", shm, err)
	}
	return nil
}

// etcFiles writes the /etc files, unless they exist. A sandbox of an earlier release has them in
// another directory.
func (r *Runtime) etcFiles(s *sandbox) error {
	s.etc.Lock() // containers may be created concurrently
	defer s.etc.Unlock()
	dir := r.etcDir(s.rec.ID)
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	hostname := s.config.GetHostname()
	if hostname == "" {
		var err error
		if hostname, err = os.Hostname(); err != nil {
			return err
		}
	}
	conf, err := resolvConf(s.config.GetDnsConfig())
	if err != nil {
		return err
	}
	tmp := dir + ".new"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.Mkdir(tmp, 0o711); err != nil {
		return err
	}
	for name, text := range map[string]string{"hostname": hostname + "\n", "resolv.conf": string(conf),
		"hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"} {
		if err := os.WriteFile(filepath.Join(tmp, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return os.Rename(tmp, dir)
}

// resolvConf returns the resolv.conf for a DNS config; the host's file if the config is empty.
func resolvConf(d *cri.DNSConfig) ([]byte, error) {
	if d == nil || len(d.Servers)+len(d.Searches)+len(d.Options) == 0 {
		b, err := os.ReadFile("/etc/resolv.conf")
		return b, ignoreMissing(err)
	}
	var b strings.Builder
	if len(d.Searches) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(d.Searches, " "))
	}
	for _, s := range d.Servers {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	if len(d.Options) > 0 {
		fmt.Fprintf(&b, "options %s\n", strings.Join(d.Options, " "))
	}
	return []byte(b.String()), nil
}

// stageList collects stage durations from several goroutines.
type stageList struct {
	mu   sync.Mutex
	list []agent.StageTime
}

func (l *stageList) add(name string, start time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, agent.StageTime{Name: name, Start: start, Duration: time.Since(start)})
}

func (l *stageList) time(name string, f func() error) error {
	start := time.Now()
	err := f()
	if err == nil {
		l.add(name, start)
	}
	return err
}
