// Package oci is Keelson's container runtime: the verbs of CRI v1 on top of one
// small shim process per pod and libcontainer, which lives in a binary of its own.
//
// The agent may be killed at any moment: what it makes is described in RunDir
// before it is made, shims keep containers, their output and their exit codes,
// and Run adopts or removes whatever it finds. Shims and records may be of another
// release: both sides speak in versions. How containers ended lies in StateDir and
// outlives a power cut.
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

// Config says where the runtime keeps its things and what it is given.
type Config struct {
	StateDir   string   // survives a reboot: how containers ended, and what containers write
	RunDir     string   // emptied by a reboot: records of sandboxes and containers, sockets, network namespaces, bundles
	ShimPath   string   // keelson-shim
	OCIPath    string   // keelson-oci
	PausePath  string   // keelson-pause
	CgroupRoot string   // cgroup below which every pod lives, from the root of each hierarchy: "/keelson"
	Handlers   []string // more names by which RuntimeClasses may ask for this runtime, which is "keelson" and "runc" anyway
	Images     agent.Images
	Network    agent.Network
	Logger     *slog.Logger

	CDI         []string // folders of device descriptions; nil = /etc/cdi and /var/run/cdi
	LogMaxSize  int64    // bytes of a container's log before it is rotated; 0 = 10 MiB
	LogMaxFiles int      // files kept of each log, the live one included; 0 = 5
}

// Runtime implements agent.Runtime.
type Runtime struct {
	cfg     Config
	log     *slog.Logger
	cgroups *cgroupTree
	spawner *spawner
	host    hostFacts

	ready   chan struct{} // closed once an earlier run's things are adopted
	oomOnce sync.Once

	mu         sync.Mutex // guards the maps and the fields of sandbox and ctr marked so
	sandboxes  map[string]*sandbox
	containers map[string]*ctr
	names      map[string]string // what a sandbox or container is called → its id
	stages     map[string][]agent.StageTime
	listeners  map[chan agent.RuntimeEvent]struct{}
	background sync.WaitGroup
	stopping   chan struct{} // closed when Run is about to end

	ends        []*ctr        // guarded by mu: ended, and not yet kept on disk
	endsWaiting chan struct{} // capacity 1: there are some
}

var (
	_ agent.EarlyRuntime    = (*Runtime)(nil)
	_ agent.MeasuredRuntime = (*Runtime)(nil)
)

// New checks nothing and starts nothing.
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

// Run adopts what an earlier run left, removes what nobody can own any more, and
// serves until ctx ends. Verbs called earlier wait. Containers keep running after
// it has returned. It can be called once.
func (r *Runtime) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, dir := range []string{r.sandboxDir(""), r.containerDir(""), r.imageVolumes(""), r.etcDir(""), r.endFile(""),
		r.netnsPath(""), r.libcontainerDir(), r.pauseRoot()} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("prepare the runtime's folders: %w", err)
		}
	}
	// What containers leave there, set-user-id programs among it, is not for the host's users.
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

// leave lets a sandbox's shim be.
func (r *Runtime) leave(s *sandbox) {
	r.mu.Lock()
	shim := s.shim
	r.mu.Unlock()
	if shim != nil {
		shim.leave()
	}
}

// wait blocks until Run has adopted what there was.
func (r *Runtime) wait(ctx context.Context) error {
	select {
	case <-r.ready:
		return ctx.Err()
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// Where things lie. An empty id gives the folder of them all.

// Records are of processes that do not outlive a reboot, and neither need they: they lie where files cost least.

func (r *Runtime) sandboxDir(id string) string { return filepath.Join(r.cfg.RunDir, "sandboxes", id) }
func (r *Runtime) containerDir(id string) string {
	return filepath.Join(r.cfg.RunDir, "containers", id)
}
func (r *Runtime) exitFile(id string) string  { return filepath.Join(r.containerDir(id), "exit") }
func (r *Runtime) netnsPath(id string) string { return filepath.Join(r.cfg.RunDir, "netns", id) }

// imageVolumes holds what a container writes to folders that its image declares as volumes.
func (r *Runtime) imageVolumes(id string) string {
	return filepath.Join(r.cfg.StateDir, "volumes", id)
}

// etcDir holds the files of a sandbox that its containers may write: on a disk, whose use can be measured, and not
// on a tmpfs that takes the node's memory.
func (r *Runtime) etcDir(id string) string { return filepath.Join(r.cfg.StateDir, "etc", id) }

func (r *Runtime) libcontainerDir() string { return filepath.Join(r.cfg.RunDir, "libcontainer") }
func (r *Runtime) pauseRoot() string       { return filepath.Join(r.cfg.RunDir, "pause") }

// Written lists the folders on disk that a container writes to, beside its volumes and its log: its own layer, the
// volumes of its image, and what it shares with the other containers of its sandbox.
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

// announce tells listeners; one that does not keep up misses it and lists later.
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

// sandbox finds a sandbox by its id.
func (r *Runtime) sandbox(id string) (*sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sandboxes[id]; s != nil {
		return s, nil
	}
	return nil, notFound("sandbox", id)
}

// container finds a container by its id.
func (r *Runtime) container(id string) (*ctr, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[id]; c != nil {
		return c, nil
	}
	return nil, notFound("container", id)
}

// ignoreMissing drops the error of removing what is not there.
func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
