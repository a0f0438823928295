package oci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/wire"
	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/safepath"
)

// adoptAtOnce bounds how many sandboxes are adopted concurrently. adoptPatience is how long the
// start waits for all of them. A sandbox that takes longer is adopted in the background and does
// not delay the others.
const (
	adoptAtOnce   = 64
	adoptPatience = 2 * time.Second
)

// adopt recovers the sandboxes and containers of an earlier agent process. Partly created ones are
// removed. The others are taken over from their shims, or recorded as ended if there is no shim any
// more. Remains without a record are removed.
func (r *Runtime) adopt(ctx context.Context) error {
	if err := r.loadSandboxes(); err != nil {
		return err
	}
	if err := r.loadContainers(); err != nil {
		return err
	}
	if err := r.loadEnds(); err != nil {
		return err
	}
	r.mu.Lock()
	all := make([]*sandbox, 0, len(r.sandboxes))
	for _, s := range r.sandboxes {
		all = append(all, s)
	}
	r.mu.Unlock()
	r.adoptAll(ctx, all)
	r.sweep(ctx)
	r.mu.Lock()
	keep := slices.Collect(maps.Keys(r.sandboxes))
	r.mu.Unlock()
	if err := r.cfg.Network.GC(ctx, keep); err != nil {
		r.log.Error("networks of lost sandboxes could not be given back", "error", err)
	}
	return ctx.Err()
}

// adoptAll adopts sandboxes concurrently. It returns when all are adopted or after adoptPatience;
// the rest continues in the background.
func (r *Runtime) adoptAll(ctx context.Context, all []*sandbox) {
	ctx, cancel := context.WithCancel(ctx)
	var g errgroup.Group
	g.SetLimit(adoptAtOnce)
	done := make(chan struct{})
	r.background.Go(func() {
		defer cancel()
		defer close(done)
		for _, s := range all {
			g.Go(func() error {
				limited, cancel := context.WithTimeout(ctx, teardownTimeout)
				defer cancel()
				if err := r.adoptSandbox(limited, s); err != nil {
					// The pod worker will stop and remove the sandbox, which tries again.
					r.log.Error("a sandbox could not be adopted", "sandbox", s.rec.ID, "error", err)
				}
				return nil
			})
		}
		_ = g.Wait() // the functions return no errors
	})
	patience := time.NewTimer(adoptPatience)
	defer patience.Stop()
	select {
	case <-done:
	case <-patience.C:
		r.log.Warn("some sandboxes of an earlier run take long to answer; the others are served")
	case <-ctx.Done():
	}
}

// loadSandboxes reads the sandbox records. A directory without a record is left from an interrupted
// removal: sweep removes it.
func (r *Runtime) loadSandboxes() error {
	entries, err := os.ReadDir(r.sandboxDir(""))
	if err != nil {
		return fmt.Errorf("read the records of sandboxes: %w", err)
	}
	for _, e := range entries {
		s := &sandbox{}
		err := durable.ReadJSON(filepath.Join(r.sandboxDir(e.Name()), "sandbox.json"), &s.rec)
		if unreadable(err) {
			return err
		}
		if err == nil {
			s.config, err = decodeSandboxConfig(s.rec.Config)
		}
		if err == nil && (s.rec.ID != e.Name() || s.config.GetMetadata() == nil) {
			err = errors.New("it is not of this folder")
		}
		if err != nil {
			r.log.Warn("a sandbox's record is unusable: its remains are removed", "sandbox", e.Name(), "error", err)
			continue
		}
		r.sandboxes[s.rec.ID] = s
		r.names[sandboxName(s.config.Metadata)] = s.rec.ID
	}
	return nil
}

func (r *Runtime) loadContainers() error {
	entries, err := os.ReadDir(r.containerDir(""))
	if err != nil {
		return fmt.Errorf("read the records of containers: %w", err)
	}
	for _, e := range entries {
		c := &ctr{ended: make(chan struct{})}
		err := durable.ReadJSON(filepath.Join(r.containerDir(e.Name()), "container.json"), &c.rec)
		if unreadable(err) {
			return err
		}
		c.rec.unend()
		c.half = c.rec.State == ContainerCreating
		if err == nil {
			c.config, err = decodeContainerConfig(c.rec.Config)
		}
		if err == nil && (c.rec.ID != e.Name() || c.config.GetMetadata() == nil) {
			err = errors.New("it is not of this folder")
		}
		if err != nil {
			r.log.Warn("a container's record is unusable: its remains are removed", "container", e.Name(), "error", err)
			continue
		}
		r.containers[c.rec.ID] = c
		r.names[containerName(c.rec.Sandbox, c.config.Metadata)] = c.rec.ID
	}
	return nil
}

// unreadable reports whether a record exists but cannot be read, for example after an I/O error.
// Then adoption fails.
func unreadable(err error) bool {
	var path *fs.PathError
	return errors.As(err, &path) && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR)
}

// adoptSandbox takes over one sandbox and its containers.
func (r *Runtime) adoptSandbox(ctx context.Context, s *sandbox) error {
	s.op.Lock()
	defer s.op.Unlock()
	r.mu.Lock()
	next, err := s.rec.State.Next(SandboxRecover)
	r.mu.Unlock()
	if err != nil {
		return err
	}
	snap, err := r.joinShim(ctx, s)
	switch {
	case next == SandboxRemoved: // its RunPodSandbox call never returned, so no caller knows the sandbox
		return r.dropSandbox(ctx, s)
	case errors.Is(err, errNoShim):
		return r.endWithoutShim(ctx, s)
	case err != nil:
		r.log.Warn("a sandbox's shim does not answer; it is asked again", "sandbox", s.rec.ID, "error", err)
		r.takeRecorded(s)
		r.background.Go(func() { r.rejoin(s) })
		return nil
	}
	return r.takeOver(ctx, s, snap)
}

// errNoShim is returned if a shim certainly does not exist: its socket refuses connections and its
// process is gone. Any other error means only that the shim did not respond.
var errNoShim = errors.New("there is no shim")

// helloTime is how long to wait for a shim's response to Hello.
const helloTime = 5 * time.Second

// joinShim connects to the shim of a sandbox that an earlier agent process started, or reconnects
// to it.
func (r *Runtime) joinShim(ctx context.Context, s *sandbox) (*wire.Snapshot, error) {
	if s.rec.Boot != r.host.boot {
		return nil, errNoShim
	}
	ctx, cancel := context.WithTimeout(ctx, helloTime)
	defer cancel()
	c, snap, err := connectShim(ctx, r.sandboxDir(s.rec.ID), func(e wire.Exited) { r.processEnded(s, e) },
		func() { r.shimLost(s) })
	if err != nil {
		refused := errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT)
		if refused && !lives(s.rec.ShimPID, "keelson-shim") {
			return nil, errNoShim
		}
		return nil, err
	}
	r.mu.Lock()
	s.shim = c
	r.mu.Unlock()
	return snap, nil
}

// takeOver updates a sandbox and its containers from the shim's snapshot.
func (r *Runtime) takeOver(ctx context.Context, s *sandbox, snap *wire.Snapshot) error {
	if snap.PauseEnded {
		r.pauseLost(s)
	}
	known := map[string]wire.Status{}
	for _, st := range snap.Containers {
		known[st.Container] = st
	}
	for _, c := range r.containersOf(s.rec.ID) {
		if err := r.adoptContainer(ctx, c, known); err != nil {
			return err
		}
	}
	return nil
}

func (r *Runtime) adoptContainer(ctx context.Context, c *ctr, known map[string]wire.Status) error {
	st, ok := known[c.rec.ID]
	switch state := r.stateOf(c); {
	case c.half: // an earlier agent process was creating it
		c.op.Lock()
		defer c.op.Unlock()
		return r.eraseContainer(ctx, c)
	case state == ContainerCreating: // this process is creating it
	case c.rec.StartError != "" && state == ContainerCreated:
		return r.adoptFailedStart(c, known != nil)
	case ok && st.State == wire.StateExited:
		e := exitRecord{Code: int32(st.Exit.Code), Finished: st.Exit.Time, Started: st.Started, OOM: st.Exit.OOM}
		r.containerEnded(c, e)
	case ok:
		r.mu.Lock()
		if c.rec.State != ContainerExited && st.State == wire.StateRunning { // it may have ended meanwhile
			c.rec.State, c.rec.Started = ContainerRunning, st.Started
		}
		r.mu.Unlock()
	default:
		r.orphanEnded(ctx, c)
	}
	return nil
}

// takeRecorded marks containers as ended if their shim has recorded the end on disk. It is used
// while the shim does not respond.
func (r *Runtime) takeRecorded(s *sandbox) {
	for _, c := range r.containersOf(s.rec.ID) {
		if e, err := r.readExit(c.rec.ID); err == nil && !c.half {
			r.containerEnded(c, e)
		}
	}
}

// rejoin reconnects to a shim that did not respond or lost its connection. It retries until the
// shim responds, is certainly gone, or the sandbox is removed.
func (r *Runtime) rejoin(s *sandbox) {
	const first, most = 2 * time.Millisecond, 10 * time.Second
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-r.stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	for pause := first; ; pause = min(2*pause, most) {
		if _, err := r.sandbox(s.rec.ID); err != nil {
			return // the sandbox was removed
		}
		limited, cancel := context.WithTimeout(ctx, teardownTimeout)
		snap, err := r.joinShim(limited, s)
		switch {
		case err == nil:
			err = r.takeOver(limited, s, snap)
		case errors.Is(err, errNoShim):
			err = r.endWithoutShim(limited, s)
		default:
			cancel()
			select {
			case <-r.stopping:
				return
			case <-time.After(pause):
			}
			continue
		}
		cancel()
		if ctx.Err() != nil {
			r.leave(s)
		}
		if err != nil {
			r.log.Error("a sandbox could not be adopted", "sandbox", s.rec.ID, "error", err)
		}
		r.announce(agent.RuntimeEvent{SandboxID: s.rec.ID, PodUID: podUID(s.config.GetMetadata().GetUid())})
		return
	}
}

// endWithoutShim ends a sandbox after its shim has died. No process reaps its containers or holds
// their streams any more. Therefore they are killed, and the sandbox becomes NotReady.
func (r *Runtime) endWithoutShim(ctx context.Context, s *sandbox) error {
	if s.rec.Boot == r.host.boot {
		killIfNamed(s.rec.PausePID, "keelson-pause")
	}
	r.pauseLost(s)
	for _, c := range r.containersOf(s.rec.ID) {
		if err := r.adoptContainer(ctx, c, nil); err != nil {
			return err
		}
	}
	return nil
}

// sweep removes everything without a record: containers of unknown sandboxes, run-time directories,
// network namespaces and image volumes.
func (r *Runtime) sweep(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*teardownTimeout)
	defer cancel()
	complain := func(what string, err error) {
		if err != nil {
			r.log.Error("a leftover resists", "what", what, "error", err)
		}
	}
	// Adoption may continue meanwhile, but it only removes entries.
	r.mu.Lock()
	var stray []*ctr
	sandboxes, containers := map[string]bool{}, map[string]bool{}
	for id := range r.sandboxes {
		sandboxes[id] = true
	}
	for id, c := range r.containers {
		if containers[id] = true; r.sandboxes[c.rec.Sandbox] == nil && !c.past {
			stray = append(stray, c)
		}
	}
	r.mu.Unlock()
	for _, c := range stray {
		c.op.Lock()
		complain("container "+c.rec.ID, r.eraseContainer(ctx, c))
		c.op.Unlock()
	}
	r.sweepFolder(r.sandboxDir(""), sandboxes, func(path, id string) error {
		killShimOf(path)
		if err := unmountShm(path); err != nil {
			return err
		}
		return safepath.RemoveAll(path)
	}, complain)
	r.sweepFolder(r.etcDir(""), sandboxes, func(path, id string) error { return safepath.RemoveAll(path) }, complain)
	r.sweepFolder(r.netnsPath(""), sandboxes, func(path, id string) error { return removeNetns(path) }, complain)
	for _, dir := range []string{r.containerDir(""), r.imageVolumes(""), r.libcontainerDir()} {
		r.sweepFolder(dir, containers, func(path, id string) error { return safepath.RemoveAll(path) }, complain)
	}
}

// sweepFolder calls remove for the entries of dir that are not in known.
func (r *Runtime) sweepFolder(dir string, known map[string]bool, remove func(path, id string) error,
	complain func(string, error)) {
	entries, err := os.ReadDir(dir)
	complain(dir, err)
	for _, e := range entries {
		if !known[e.Name()] {
			path := filepath.Join(dir, e.Name())
			complain(path, remove(path, e.Name()))
		}
	}
}

// killShimOf shuts down a shim for which there is no sandbox record.
func killShimOf(dir string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, _, err := connectShim(ctx, dir, func(wire.Exited) {}, func() {})
	if err == nil {
		c.shutdown(ctx)
	}
}
