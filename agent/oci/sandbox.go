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
	"keelson.dev/keelson/agent/oci/containerspec"
	"keelson.dev/keelson/agent/oci/netns"
	"keelson.dev/keelson/agent/oci/shimclient"
	"keelson.dev/keelson/agent/oci/wire"
	"keelson.dev/keelson/internal/quantitytext"
	"keelson.dev/keelson/internal/saturate"
)

// sandbox is the runtime's state of the sandbox of one pod: its stored record, its configuration
// and the locks of its operations.
type sandbox struct {
	runtime *Runtime

	// lifecycle serializes the operations that change the sandbox: run, stop, remove. It is locked
	// before container.operation.
	lifecycle sync.Mutex
	// teardown prevents teardown while a container is created in the sandbox: creators hold the
	// read lock, teardown holds the write lock.
	teardown sync.RWMutex

	etc    sync.Mutex    // guards the sandbox's /etc files
	rec    sandboxRecord // State, IPs and PausePID are guarded by Runtime.mu
	lost   bool          // guarded by Runtime.mu: pause or the shim exited before the sandbox was ready
	config *cri.PodSandboxConfig
	shim   *shimclient.Client // guarded by Runtime.mu; nil if not connected
}

func (s *sandbox) namespaceOptions() *cri.NamespaceOption {
	return s.config.GetLinux().GetSecurityContext().GetNamespaceOptions()
}

func (s *sandbox) usesHostNetwork() bool {
	return s.namespaceOptions().GetNetwork() == cri.NamespaceMode_NODE
}

// cgroupPath returns the pod's cgroup, relative to the runtime's root.
func (s *sandbox) cgroupPath() string {
	if p := s.config.GetLinux().GetCgroupParent(); p != "" {
		return filepath.Join("/", p)
	}
	return "/pod" + s.config.GetMetadata().GetUid()
}

func sandboxName(metadata *cri.PodSandboxMetadata) string {
	return fmt.Sprintf("%s/%s/%s/%d", metadata.GetNamespace(), metadata.GetName(), metadata.GetUid(),
		metadata.GetAttempt())
}

func (s *sandbox) networkRequest() agent.NetworkRequest {
	m := s.config.GetMetadata()
	q := agent.NetworkRequest{SandboxID: s.rec.ID, NetNS: s.runtime.paths.netnsPath(s.rec.ID),
		Namespace: m.GetNamespace(), Name: m.GetName(), UID: podUID(m.GetUid()), Ports: s.config.GetPortMappings()}
	q.Ingress = parseBandwidth(s.config.GetAnnotations()[ingressBandwidth])
	q.Egress = parseBandwidth(s.config.GetAnnotations()[egressBandwidth])
	return q
}

// The annotations that limit a pod's bandwidth in bits per second, and the range of their values,
// as in Kubernetes.
const (
	ingressBandwidth = "kubernetes.io/ingress-bandwidth"
	egressBandwidth  = "kubernetes.io/egress-bandwidth"
	minBandwidth     = 1_000
	maxBandwidth     = 1_000_000_000_000_000
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
		if err != nil || n < minBandwidth || n > maxBandwidth {
			v = v[:min(len(v), maxQuantity)]
			return fmt.Errorf("annotation %s=%q: want bits per second from 1k to 1P, such as 10M", name, v)
		}
	}
	return nil
}

// parseQuantity parses the value of an annotation. It rejects a value longer than maxQuantity,
// which could take long to parse.
func parseQuantity(value string) (resource.Quantity, error) {
	if err := quantitytext.Check(value); err != nil || len(value) > maxQuantity {
		return resource.Quantity{}, cmp.Or(err, resource.ErrFormatWrong)
	}
	return resource.ParseQuantity(value)
}

// parseBandwidth returns the value of a bandwidth annotation, which checkBandwidth has accepted; 0
// if it is not set.
func parseBandwidth(value string) int64 {
	q, err := parseQuantity(value)
	if err != nil {
		return 0
	}
	return q.Value()
}

// RunPodSandbox implements agent.Runtime. A repeated request for a ready sandbox returns that
// sandbox.
func (r *Runtime) RunPodSandbox(ctx context.Context,
	request *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error) {
	return r.RunPodSandboxEarly(ctx, request, func(string) {})
}

// RunPodSandboxEarly implements agent.EarlyRuntime.
func (r *Runtime) RunPodSandboxEarly(ctx context.Context, request *cri.RunPodSandboxRequest,
	prepared func(id string)) (*cri.RunPodSandboxResponse, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	config := request.GetConfig()
	if err := checkSandboxConfig(config); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if err := checkBandwidth(config.GetAnnotations()); err != nil {
		return nil, err
	}
	if err := r.cfg.checkHandler(request.GetRuntimeHandler(), config.GetMetadata()); err != nil {
		return nil, err
	}
	data, err := proto.Marshal(config)
	if err != nil {
		return nil, err
	}
	s := &sandbox{runtime: r, config: config, rec: sandboxRecord{ID: newID(), State: SandboxCreating, Config: data,
		Handler: request.GetRuntimeHandler(), Created: time.Now().UnixNano(), Boot: containerspec.BootID()}}
	s.lifecycle.Lock()
	defer s.lifecycle.Unlock()
	if existing := r.reserveSandbox(s); existing != nil {
		if res, err := existing.existingSandbox(ctx); res != nil || err != nil {
			return res, err
		}
		if r.reserveSandbox(s) != nil { // the old remains are gone, but another request was faster
			return nil, status.Errorf(codes.Aborted, "sandbox of pod %s/%s is being created by another request",
				config.Metadata.Namespace, config.Metadata.Name)
		}
	}
	if err := s.buildSandbox(ctx, prepared); err != nil {
		s.teardown.Lock() // containers may be being created
		defer s.teardown.Unlock()
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
		defer cancel()
		if e := s.removeSandbox(cleanup); e != nil {
			r.log.Error("cannot remove a sandbox whose creation failed; retrying", "sandbox", s.rec.ID, "error", e)
			s.retryRemoval()
		}
		return nil, fmt.Errorf("run sandbox for pod %s/%s: %w", config.Metadata.Namespace, config.Metadata.Name, err)
	}
	r.broadcastEvent(agent.RuntimeEvent{SandboxID: s.rec.ID, PodUID: podUID(config.Metadata.Uid)})
	return &cri.RunPodSandboxResponse{PodSandboxId: s.rec.ID}, nil
}

const teardownTimeout = 30 * time.Second

// reserveSandbox registers s under its name and returns nil. If another sandbox has the name, it
// returns that sandbox and does not register s.
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

// existingSandbox handles a repeated request to run a sandbox. If the existing sandbox is ready, it
// returns that sandbox. Otherwise it removes the remains of the failed sandbox and returns nil, so
// that the caller can create a new one.
func (existing *sandbox) existingSandbox(ctx context.Context) (*cri.RunPodSandboxResponse, error) {
	r := existing.runtime
	existing.lifecycle.Lock() // wait until the first request has returned
	defer existing.lifecycle.Unlock()
	r.mu.Lock()
	state := existing.rec.State
	r.mu.Unlock()
	switch state {
	case SandboxReady:
		return &cri.RunPodSandboxResponse{PodSandboxId: existing.rec.ID}, nil
	case SandboxCreating, SandboxPrepared, SandboxRemoved:
		if err := existing.removePartialSandbox(ctx); err != nil {
			return nil, fmt.Errorf("remove the earlier sandbox %s of that pod: %w", existing.rec.ID, err)
		}
		return nil, nil
	}
	return nil, status.Errorf(codes.AlreadyExists, "sandbox %s of that pod and attempt exists and is %s",
		existing.rec.ID, state)
}

// removePartialSandbox removes a sandbox that was never ready. The caller holds its lifecycle lock.
func (s *sandbox) removePartialSandbox(ctx context.Context) error {
	r := s.runtime
	s.teardown.Lock()
	defer s.teardown.Unlock()
	r.mu.Lock()
	half := s.rec.State == SandboxCreating || s.rec.State == SandboxPrepared
	r.mu.Unlock()
	if !half {
		return nil
	}
	return s.removeSandbox(ctx)
}

// retryRemoval retries in the background to remove the remains of a failed sandbox. No caller would
// remove them, because RunPodSandbox did not return the sandbox's ID.
func (s *sandbox) retryRemoval() {
	r := s.runtime
	const first, maxDelay = time.Second, time.Minute
	r.life.background.Go(func() {
		for pause := first; ; pause = min(2*pause, maxDelay) {
			select {
			case <-r.life.stopping:
				return // the next agent process removes sandboxes in that state
			case <-time.After(pause):
			}
			ctx, cancel := context.WithTimeout(context.Background(), teardownTimeout)
			s.lifecycle.Lock()
			err := s.removePartialSandbox(ctx)
			s.lifecycle.Unlock()
			cancel()
			if err == nil {
				return
			}
		}
	})
}

func checkSandboxConfig(config *cri.PodSandboxConfig) error {
	m := config.GetMetadata()
	if m.GetName() == "" || m.GetNamespace() == "" || m.GetUid() == "" {
		return errors.New("sandbox metadata needs name, namespace and uid")
	}
	ns := config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	if u := ns.GetUsernsOptions(); u != nil && u.Mode != cri.NamespaceMode_NODE {
		return errors.New("user namespaces (hostUsers: false) are not supported by this runtime")
	}
	if p := config.GetLinux().GetCgroupParent(); strings.Contains(p, "..") {
		return fmt.Errorf("cgroup parent %q is outside of its root", p)
	}
	for name := range config.GetLinux().GetSysctls() {
		if err := checkSysctl(name, ns); err != nil {
			return err
		}
	}
	return nil
}

// checkSysctl returns an error for a sysctl that is not confined to the pod's own namespaces.
func checkSysctl(name string, ns *cri.NamespaceOption) error {
	dotted := strings.ReplaceAll(name, "/", ".")
	switch {
	case strings.Contains(dotted, ".."):
		return fmt.Errorf("sysctl %q is malformed", name)
	case strings.HasPrefix(dotted, "net."):
		if ns.GetNetwork() == cri.NamespaceMode_NODE {
			return fmt.Errorf("sysctl %q is not allowed with the host's network", name)
		}
	case strings.HasPrefix(dotted, "kernel.shm"), strings.HasPrefix(dotted, "kernel.msg"), dotted == "kernel.sem",
		strings.HasPrefix(dotted, "fs.mqueue."):
		if ns.GetIpc() == cri.NamespaceMode_NODE {
			return fmt.Errorf("sysctl %q is not allowed with the host's IPC", name)
		}
	default:
		return fmt.Errorf("sysctl %q is not namespaced", name)
	}
	return nil
}

// buildSandbox creates the sandbox. It sets up the network while it prepares the shim, cgroup and
// files. Pause starts as soon as the shim and the network namespace exist. buildSandbox calls
// prepared with the sandbox's ID when everything except the network is ready.
func (s *sandbox) buildSandbox(ctx context.Context, prepared func(id string)) error {
	r := s.runtime
	id := s.rec.ID
	if err := os.Mkdir(r.paths.sandboxDir(id), 0o711); err != nil {
		return err
	}
	if err := r.paths.saveSandbox(&s.rec); err != nil {
		return err
	}
	stages := &stageList{}
	namespace := make(chan struct{})
	var net agent.NetworkStatus
	group, gctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		if s.usesHostNetwork() {
			close(namespace)
			return nil
		}
		if err := stages.measureStage("netns", func() error {
			return netns.CreatePinned(r.paths.netnsPath(id))
		}); err != nil {
			return err
		}
		close(namespace)
		return stages.measureStage("cni", func() (err error) {
			net, err = r.cfg.Network.Add(gctx, s.networkRequest())
			return err
		})
	})
	var g errgroup.Group // everything except the network
	g.Go(func() error { return r.cgroups.CreateCgroup(s.cgroupPath(), r.cgroups.PodCgroupResources(s.config)) })
	g.Go(func() error { return s.createSandboxFiles() })
	g.Go(func() error {
		start := time.Now()
		if err := s.launchShim(gctx); err != nil {
			return err
		}
		select {
		case <-namespace:
		case <-gctx.Done():
			return gctx.Err()
		}
		if err := s.startPause(gctx); err != nil {
			return err
		}
		stages.addStage("pause", start)
		return nil
	})
	group.Go(func() error {
		if err := g.Wait(); err != nil {
			return err
		}
		if err := s.advanceState(SandboxBuilt, nil); err != nil {
			return err
		}
		prepared(id)
		return nil
	})
	if err := group.Wait(); err != nil {
		return err
	}
	if err := s.advanceState(SandboxRan, net.IPs); err != nil {
		return err
	}
	r.mu.Lock()
	rec := s.rec
	r.stages[id] = stages.stages
	r.mu.Unlock()
	return r.paths.saveSandbox(&rec)
}

// advanceState applies an input to the state of a sandbox that is being created. It returns an
// error if pause or the shim has already exited.
func (s *sandbox) advanceState(input SandboxInput, ips []string) error {
	r := s.runtime
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.lost {
		return errors.New("pause or the shim exited while the sandbox was being created")
	}
	next, err := s.rec.State.NextState(input)
	if err != nil {
		return err
	}
	s.rec.State, s.rec.IPs = next, ips
	return nil
}

// launchShim starts the sandbox's shim and connects to it.
func (s *sandbox) launchShim(ctx context.Context) error {
	r := s.runtime
	pid, err := r.startShim(r.paths.sandboxDir(s.rec.ID))
	if err != nil {
		return err
	}
	s.rec.ShimPID = pid
	c, _, err := shimclient.Connect(ctx, r.paths.sandboxDir(s.rec.ID), s.handleProcessEnd, s.handleShimLoss)
	if err != nil {
		_ = unix.Kill(pid, unix.SIGKILL)
		return fmt.Errorf("connect to the shim: %w", err)
	}
	r.mu.Lock()
	s.shim = c
	r.mu.Unlock()
	return nil
}

func (s *sandbox) startPause(ctx context.Context) error {
	r := s.runtime
	ns := s.namespaceOptions()
	m := wire.Pause{Root: r.paths.pauseRoot(), Program: pauseProgram,
		NewIPC: ns.GetIpc() != cri.NamespaceMode_NODE,
		NewUTS: !s.usesHostNetwork(), // as in Kubernetes, the host's network implies the host's name
		NewPID: ns.GetPid() == cri.NamespaceMode_POD,
	}
	if m.NewUTS {
		m.Hostname = s.config.GetHostname()
	}
	if !s.usesHostNetwork() {
		m.NetNS = r.paths.netnsPath(s.rec.ID)
	}
	for k, v := range s.config.GetLinux().GetSysctls() {
		m.Sysctls = append(m.Sysctls, k+"="+v)
	}
	f, err := s.shim.CallShim(ctx, wire.KindPause, &m)
	if err != nil {
		return fmt.Errorf("start pause: %w", err)
	}
	st, err := s.shim.DecodeStarted(f)
	if err != nil {
		return fmt.Errorf("start pause: %w", err)
	}
	r.mu.Lock()
	s.rec.PausePID = int(st.PID)
	r.mu.Unlock()
	return nil
}

// createSandboxFiles writes the sandbox's /etc files and mounts the /dev/shm that its containers
// share.
func (s *sandbox) createSandboxFiles() error {
	r := s.runtime
	if err := s.writeEtcFiles(); err != nil {
		return err
	}
	// The previous release expects the files here when it creates a container in the sandbox.
	for _, name := range containerspec.EtcNames {
		if err := os.Symlink(filepath.Join(r.paths.etcDir(s.rec.ID), name),
			filepath.Join(r.paths.sandboxDir(s.rec.ID), name)); err != nil {
			return err
		}
	}
	if s.namespaceOptions().GetIpc() == cri.NamespaceMode_NODE {
		return nil
	}
	shm := filepath.Join(r.paths.sandboxDir(s.rec.ID), "shm")
	if err := os.Mkdir(shm, 0o711); err != nil {
		return err
	}
	if err := unix.Mount("shm", shm, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC,
		"mode=1777,size=65536k"); err != nil {
		return fmt.Errorf("mount %s: %w", shm, err)
	}
	return nil
}

// writeEtcFiles writes the sandbox's /etc files, unless they exist. A sandbox of an earlier release
// has no files in this directory.
func (s *sandbox) writeEtcFiles() error {
	s.etc.Lock() // containers may be created concurrently
	defer s.etc.Unlock()
	dir := s.runtime.paths.etcDir(s.rec.ID)
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
	conf, err := resolvConfContent(s.config.GetDnsConfig())
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

// resolvConfContent returns the resolv.conf for a DNS config; the host's file if the config is
// empty.
func resolvConfContent(config *cri.DNSConfig) ([]byte, error) {
	if config == nil || len(config.Servers)+len(config.Searches)+len(config.Options) == 0 {
		b, err := os.ReadFile("/etc/resolv.conf")
		return b, ignoreMissing(err)
	}
	var b strings.Builder
	if len(config.Searches) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(config.Searches, " "))
	}
	for _, s := range config.Servers {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	if len(config.Options) > 0 {
		fmt.Fprintf(&b, "options %s\n", strings.Join(config.Options, " "))
	}
	return []byte(b.String()), nil
}

// stageList collects the measured steps of an operation from several goroutines.
type stageList struct {
	mu     sync.Mutex
	stages []agent.StageTime
}

func (l *stageList) addStage(name string, start time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stages = append(l.stages, agent.StageTime{Name: name, Start: start, Duration: time.Since(start)})
}

func (l *stageList) measureStage(name string, run func() error) error {
	start := time.Now()
	err := run()
	if err == nil {
		l.addStage(name, start)
	}
	return err
}
