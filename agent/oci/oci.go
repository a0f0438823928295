// Package oci is Keelson's container runtime. It implements the operations of CRI v1 with one small
// shim process per pod, and with libcontainer in a separate binary.
//
// The agent may be killed at any time. Therefore each object is recorded in RunDir before it is
// created. Shims keep containers, their output and their exit codes. Run adopts or removes
// everything that it finds. Shims and records may be of another release: both have versions. How
// containers ended is stored in StateDir and survives a power failure.
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
	"keelson.dev/keelson/internal/durable"
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
	log     *slog.Logger
	cgroups *cgroupTree
	spawner *spawner
	host    hostFacts

	ready   chan struct{} // closed when the sandboxes of an earlier agent process are adopted
	oomOnce sync.Once

	mu         sync.Mutex // guards the maps, and the fields of sandbox and ctr that are marked
	sandboxes  map[string]*sandbox
	containers map[string]*ctr
	names      map[string]string // name of a sandbox or container → its ID
	stages     map[string][]agent.StageTime
	listeners  map[chan agent.RuntimeEvent]struct{}
	background sync.WaitGroup
	stopping   chan struct{} // closed when Run is about to return

	ends        []*ctr        // guarded by mu: ended containers for keepEnds
	endsWaiting chan struct{} // capacity 1: signals that ends is not empty
}

var (
	_ agent.EarlyRuntime    = (*Runtime)(nil)
	_ agent.MeasuredRuntime = (*Runtime)(nil)
)

// New returns a Runtime with defaults applied. It checks nothing and starts nothing.
func New(cfg Config) *Runtime {
	if cfg.LogMaxSize == 0 {
		cfg.LogMaxSize = 10 << 20
	}
	if cfg.LogMaxFiles == 0 {
		cfg.LogMaxFiles = 5
	}
	if cfg.CDI == nil {
		cfg.CDI = cdiFolders
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Runtime{
		cfg: cfg, log: cfg.Logger, ready: make(chan struct{}), stopping: make(chan struct{}), endsWaiting: make(chan struct{},
			1),
		sandboxes: map[string]*sandbox{}, containers: map[string]*ctr{}, names: map[string]string{},
		stages: map[string][]agent.StageTime{}, listeners: map[chan agent.RuntimeEvent]struct{}{},
	}
}

// Run adopts the sandboxes of an earlier agent process, removes remains, and serves until ctx ends.
// Operations called earlier wait for the adoption. Containers keep running after it returns. It can
// be called once.
func (r *Runtime) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, dir := range []string{r.sandboxDir(""), r.containerDir(""), r.imageVolumes(""), r.etcDir(""), r.endFile(""),
		r.netnsPath(""), r.libcontainerDir(), r.pauseRoot()} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("prepare the runtime's folders: %w", err)
		}
	}
	// Files of containers, such as set-user-id programs, must not be accessible to the host's
	// users.
	if err := os.Chmod(r.cfg.StateDir, 0o700); err != nil {
		return fmt.Errorf("prepare the runtime's folders: %w", err)
	}
	var err error
	if r.cgroups, err = findCgroups(r.cfg.CgroupRoot); err != nil {
		return err
	}
	if r.host, err = lookAtHost(r.cgroups.unified); err != nil {
		return err
	}
	if err := installPause(r.cfg.PausePath, r.pauseRoot()); err != nil {
		return fmt.Errorf("install pause: %w", err)
	}
	if r.spawner, err = newSpawner(r.cgroups); err != nil {
		return err
	}
	if r.cgroups.unified {
		_, err := os.Stat(filepath.Join(r.cgroups.paths(shimCgroup)[0], swapMax))
		r.host.swapFile = err == nil
	}
	defer r.spawner.stop()
	r.background.Go(func() { r.keepEnds(ctx) })
	if err := r.adopt(ctx); err != nil {
		return err
	}
	close(r.ready)
	<-ctx.Done()
	close(r.stopping)
	r.mu.Lock()
	all := slices.Collect(maps.Values(r.sandboxes))
	r.mu.Unlock()
	for _, s := range all {
		r.leave(s)
	}
	r.background.Wait()
	return nil
}

// leave disconnects from a sandbox's shim, which keeps running.
func (r *Runtime) leave(s *sandbox) {
	r.mu.Lock()
	shim := s.shim
	r.mu.Unlock()
	if shim != nil {
		shim.leave()
	}
}

// wait blocks until Run has finished the adoption, or ctx ends.
func (r *Runtime) wait(ctx context.Context) error {
	select {
	case <-r.ready:
		return ctx.Err()
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// The paths of objects. An empty id gives the directory of all objects of the kind.

// Records are in RunDir, which is usually a tmpfs: the processes that they describe do not survive
// a reboot either.

func (r *Runtime) sandboxDir(id string) string { return filepath.Join(r.cfg.RunDir, "sandboxes", id) }
func (r *Runtime) containerDir(id string) string {
	return filepath.Join(r.cfg.RunDir, "containers", id)
}
func (r *Runtime) exitFile(id string) string  { return filepath.Join(r.containerDir(id), "exit") }
func (r *Runtime) netnsPath(id string) string { return filepath.Join(r.cfg.RunDir, "netns", id) }

// imageVolumes returns the directory for the volumes that a container's image declares.
func (r *Runtime) imageVolumes(id string) string {
	return filepath.Join(r.cfg.StateDir, "volumes", id)
}

// etcDir returns the directory of a sandbox's files that its containers may write. It is on disk,
// where usage is measured, and not on a tmpfs, which would use the node's memory.
func (r *Runtime) etcDir(id string) string { return filepath.Join(r.cfg.StateDir, "etc", id) }

func (r *Runtime) libcontainerDir() string { return filepath.Join(r.cfg.RunDir, "libcontainer") }
func (r *Runtime) pauseRoot() string       { return filepath.Join(r.cfg.RunDir, "pause") }

// Written returns the directories on disk that a container writes to, except its volumes and its
// log. own are its layer and its image volumes. shared are directories that it shares with the
// other containers of its sandbox.
func (r *Runtime) Written(containerID string) (own, shared []string) {
	c, err := r.container(containerID)
	if err != nil {
		return nil, nil
	}
	own = []string{r.imageVolumes(containerID)}
	var b bundle.Create
	if err := durable.ReadJSON(r.bundlePath(containerID), &b); err == nil && b.Overlay != nil {
		own = append(own, b.Overlay.Upper)
	}
	return own, []string{r.etcDir(c.rec.Sandbox)}
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

// announce sends an event to all listeners. A slow listener misses it and has to list again.
func (r *Runtime) announce(e agent.RuntimeEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for ch := range r.listeners {
		select {
		case ch <- e:
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

func notFound(what, id string) error {
	return status.Errorf(codes.NotFound, "%s %q not found", what, id)
}

// sandbox returns the sandbox with this ID, or a NotFound error.
func (r *Runtime) sandbox(id string) (*sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sandboxes[id]; s != nil {
		return s, nil
	}
	return nil, notFound("sandbox", id)
}

// container returns the container with this ID, or a NotFound error.
func (r *Runtime) container(id string) (*ctr, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[id]; c != nil {
		return c, nil
	}
	return nil, notFound("container", id)
}

// ignoreMissing returns nil for a "does not exist" error, else err.
func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
