// Package oci is Keelson's container runtime. It implements the operations of CRI v1 with one small
// shim process per pod, and with libcontainer in a separate binary.
//
// The agent may be killed at any time. Therefore each object is recorded in RunDir before it is
// created. Shims hold the containers, their output and their exit codes while no agent runs. Run
// takes over (adopts) or removes everything that it finds. Shims and records may be of another
// release: both have versions. How containers exited is stored in StateDir and survives a power
// failure.
package oci

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/bundle"
	"keelson.dev/keelson/agent/oci/containerspec"
	"keelson.dev/keelson/agent/oci/podcgroup"
	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/wakeup"
)

// Config is the configuration of a Runtime.
type Config struct {
	StateDir   string   // survives a reboot: how containers ended, and their writable files
	RunDir     string   // emptied by a reboot: records, sockets, network namespaces, bundles
	ShimPath   string   // path of keelson-shim
	OCIPath    string   // path of keelson-oci
	PausePath  string   // path of keelson-pause
	CgroupRoot string   // parent cgroup of all pods, from the root of each hierarchy: "/keelson"
	Handlers   []string // handler names for RuntimeClasses, in addition to "keelson" and "runc"
	Images     agent.Images
	Network    agent.Network
	Logger     *slog.Logger

	CDI         []string // directories of CDI specifications; nil = /etc/cdi and /var/run/cdi
	LogMaxSize  int64    // size in bytes at which a container's log is rotated; 0 = 10 MiB
	LogMaxFiles int      // number of files of each log, including the current one; 0 = 5
}

// Runtime implements agent.Runtime.
type Runtime struct {
	cfg     Config
	paths   layout
	log     *slog.Logger
	cgroups *podcgroup.Tree
	spawner *spawner
	host    containerspec.Host

	life    life
	oomOnce sync.Once

	mu         sync.Mutex // guards the maps, and the fields of sandbox and container that are marked
	sandboxes  map[string]*sandbox
	containers map[string]*container
	names      map[string]string // name of a sandbox or container → its ID
	stages     map[string][]agent.StageTime
	listeners  map[chan agent.RuntimeEvent]struct{}
	ends       endQueue
}

// life has the channels that report the progress of Run, and the background goroutines.
type life struct {
	ready      chan struct{} // closed when the sandboxes of an earlier agent process are adopted
	stopping   chan struct{} // closed when Run is about to return
	background sync.WaitGroup
}

// endQueue contains the containers with end files that must be synced.
type endQueue struct {
	unsynced []*container  // guarded by Runtime.mu
	queued   wakeup.Signal // signals that unsynced is not empty
}

var (
	_ agent.EarlyRuntime    = (*Runtime)(nil)
	_ agent.MeasuredRuntime = (*Runtime)(nil)
)

// WithDefaults returns the configuration with the defaults of unset fields.
func (c Config) WithDefaults() Config {
	if c.LogMaxSize == 0 {
		c.LogMaxSize = 10 << 20
	}
	if c.LogMaxFiles == 0 {
		c.LogMaxFiles = 5
	}
	if c.CDI == nil {
		c.CDI = containerspec.DefaultCDIDirs
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// New returns a Runtime with defaults applied. It checks nothing and starts nothing.
func New(cfg Config) *Runtime {
	cfg = cfg.WithDefaults()
	return &Runtime{
		cfg: cfg, paths: layout{stateDir: cfg.StateDir, runDir: cfg.RunDir}, log: cfg.Logger,
		life: life{ready: make(chan struct{}), stopping: make(chan struct{})}, ends: endQueue{queued: wakeup.New()},
		sandboxes: map[string]*sandbox{}, containers: map[string]*container{}, names: map[string]string{},
		stages: map[string][]agent.StageTime{}, listeners: map[chan agent.RuntimeEvent]struct{}{},
	}
}

// Run adopts the sandboxes of an earlier agent process, removes the remains of unknown ones, and
// serves until ctx ends. Operations that are called earlier wait for the adoption. Containers keep
// running after Run returns. It can be called once.
func (r *Runtime) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, dir := range []string{r.paths.sandboxDir(""), r.paths.containerDir(""), r.paths.imageVolumes(""),
		r.paths.etcDir(""), r.paths.endFile(""), r.paths.netnsPath(""), r.paths.libcontainerDir(),
		r.paths.pauseRoot()} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("create the runtime's directories: %w", err)
		}
	}
	// Files of containers, such as set-user-id programs, must not be accessible to the host's
	// users.
	if err := os.Chmod(r.cfg.StateDir, 0o700); err != nil {
		return fmt.Errorf("create the runtime's directories: %w", err)
	}
	var err error
	if r.cgroups, err = podcgroup.Detect(r.cfg.CgroupRoot); err != nil {
		return err
	}
	if r.host, err = containerspec.DetectHost(r.cgroups.Unified); err != nil {
		return err
	}
	if err := installPause(r.cfg.PausePath, r.paths.pauseRoot()); err != nil {
		return fmt.Errorf("install pause: %w", err)
	}
	if r.spawner, err = newSpawner(r.cgroups); err != nil {
		return err
	}
	if r.cgroups.Unified {
		_, err := os.Stat(filepath.Join(r.cgroups.CgroupPaths(shimCgroup)[0], containerspec.SwapMax))
		r.host.SwapFile = err == nil
	}
	defer r.spawner.stopThread()
	r.life.background.Go(func() { r.syncEndFiles(ctx) })
	if err := (adoption{r}).adoptSandboxes(ctx); err != nil {
		return err
	}
	close(r.life.ready)
	<-ctx.Done()
	close(r.life.stopping)
	r.mu.Lock()
	sandboxes := slices.Collect(maps.Values(r.sandboxes))
	r.mu.Unlock()
	for _, s := range sandboxes {
		s.disconnectShim()
	}
	r.life.background.Wait()
	return nil
}

// disconnectShim disconnects from a sandbox's shim, which keeps running.
func (s *sandbox) disconnectShim() {
	r := s.runtime
	r.mu.Lock()
	shim := s.shim
	r.mu.Unlock()
	if shim != nil {
		shim.Disconnect()
	}
}

// awaitReady blocks until Run has finished the adoption, or ctx ends.
func (r *Runtime) awaitReady(ctx context.Context) error {
	select {
	case <-r.life.ready:
		return ctx.Err()
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// layout returns the paths of the runtime's files. If a method's id is empty, it returns the
// directory of all objects of the kind.
//
// Records are in RunDir, which is usually a tmpfs: the processes that they describe do not survive
// a reboot either.
type layout struct{ stateDir, runDir string }

func (l layout) sandboxDir(id string) string { return filepath.Join(l.runDir, "sandboxes", id) }
func (l layout) containerDir(id string) string {
	return filepath.Join(l.runDir, "containers", id)
}
func (l layout) exitFile(id string) string  { return filepath.Join(l.containerDir(id), "exit") }
func (l layout) netnsPath(id string) string { return filepath.Join(l.runDir, "netns", id) }

// imageVolumes returns the directory for the volumes that a container's image declares.
func (l layout) imageVolumes(id string) string {
	return filepath.Join(l.stateDir, "volumes", id)
}

// etcDir returns the directory of a sandbox's /etc files that its containers may write to. It is on
// disk, where its usage is measured, and not on a tmpfs, which would use the node's memory.
func (l layout) etcDir(id string) string { return filepath.Join(l.stateDir, "etc", id) }

func (l layout) libcontainerDir() string { return filepath.Join(l.runDir, "libcontainer") }
func (l layout) pauseRoot() string       { return filepath.Join(l.runDir, "pause") }

// WrittenDirs returns the directories on disk that a container writes to, except its volumes and
// its log. layers are its writable layer and its image volumes. shared are directories that the
// container shares with the other containers of its sandbox.
func (r *Runtime) WrittenDirs(containerID string) (layers, shared []string) {
	c, err := r.findContainer(containerID)
	if err != nil {
		return nil, nil
	}
	layers = []string{r.paths.imageVolumes(containerID)}
	var b bundle.Create
	if err := durable.ReadJSON(r.paths.bundlePath(containerID), &b); err == nil && b.Overlay != nil {
		layers = append(layers, b.Overlay.Upper)
	}
	return layers, []string{r.paths.etcDir(c.rec.Sandbox)}
}

// Events implements agent.Runtime.
func (r *Runtime) Events(ctx context.Context) <-chan agent.RuntimeEvent {
	ch := make(chan agent.RuntimeEvent, 256)
	r.mu.Lock()
	r.listeners[ch] = struct{}{}
	r.mu.Unlock()
	context.AfterFunc(ctx, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.listeners, ch)
		close(ch)
	})
	return ch
}

// broadcastEvent sends an event to all listeners. A slow listener misses the event and must list
// again.
func (r *Runtime) broadcastEvent(event agent.RuntimeEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for ch := range r.listeners {
		select {
		case ch <- event:
		default:
		}
	}
}

// StageTimes implements agent.Runtime.
func (r *Runtime) StageTimes(id string) []agent.StageTime {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.stages[id]
	delete(r.stages, id)
	return t
}

func podUID(uid string) types.UID { return types.UID(uid) }

func notFoundError(prefix, id string) error {
	return status.Errorf(codes.NotFound, "%s %q not found", prefix, id)
}

// findSandbox returns the sandbox with this ID, or a NotFound error.
func (r *Runtime) findSandbox(id string) (*sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sandboxes[id]; s != nil {
		return s, nil
	}
	return nil, notFoundError("sandbox", id)
}

// findContainer returns the container with this ID, or a NotFound error.
func (r *Runtime) findContainer(id string) (*container, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[id]; c != nil {
		return c, nil
	}
	return nil, notFoundError("container", id)
}

// ignoreMissing returns nil for a "does not exist" error, else err.
func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
