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
	"keelson.dev/keelson/agent/oci/netns"
	"keelson.dev/keelson/agent/oci/shimclient"
	"keelson.dev/keelson/agent/oci/wire"
	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/safepath"
)

// maxConcurrentAdoptions is the maximum number of sandboxes that are adopted concurrently.
// adoptPatience is how long the start of the runtime waits for the adoption of all sandboxes. A
// sandbox that takes longer is adopted in the background.
const (
	maxConcurrentAdoptions = 64
	adoptPatience          = 2 * time.Second
)

// adoption restores the runtime's state from the records, shims and files of an earlier agent
// process, before the runtime is ready.
type adoption struct{ runtime *Runtime }

// adoptSandboxes recovers the sandboxes and containers of an earlier agent process. It removes
// objects that were only partly created. It takes over the others from their shims; without a shim,
// it records the containers as exited. Remains without a record are removed, and the network plugin
// releases the networks of unknown sandboxes.
func (a adoption) adoptSandboxes(ctx context.Context) error {
	if err := a.loadSandboxes(); err != nil {
		return err
	}
	if err := a.loadContainers(); err != nil {
		return err
	}
	if err := a.loadEnds(); err != nil {
		return err
	}
	a.runtime.mu.Lock()
	sandboxes := make([]*sandbox, 0, len(a.runtime.sandboxes))
	for _, s := range a.runtime.sandboxes {
		sandboxes = append(sandboxes, s)
	}
	a.runtime.mu.Unlock()
	a.adoptConcurrently(ctx, sandboxes)
	a.removeRemains(ctx)
	a.runtime.mu.Lock()
	keep := slices.Collect(maps.Keys(a.runtime.sandboxes))
	a.runtime.mu.Unlock()
	if err := a.runtime.cfg.Network.GC(ctx, keep); err != nil {
		a.runtime.log.Error("cannot release the networks of lost sandboxes", "error", err)
	}
	return ctx.Err()
}

// adoptConcurrently adopts sandboxes concurrently. It returns when all sandboxes are adopted, or
// after adoptPatience while the remaining adoptions continue in the background.
func (a adoption) adoptConcurrently(ctx context.Context, sandboxes []*sandbox) {
	ctx, cancel := context.WithCancel(ctx)
	var g errgroup.Group
	g.SetLimit(maxConcurrentAdoptions)
	done := make(chan struct{})
	a.runtime.life.background.Go(func() {
		defer cancel()
		defer close(done)
		for _, s := range sandboxes {
			g.Go(func() error {
				limited, cancel := context.WithTimeout(ctx, teardownTimeout)
				defer cancel()
				if err := s.adoptSandbox(limited); err != nil {
					// The pod worker will stop and remove the sandbox, which tries again.
					a.runtime.log.Error("cannot adopt a sandbox", "sandbox", s.rec.ID, "error", err)
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
		a.runtime.log.Warn(
			"adopting some sandboxes of an earlier agent process takes long; continuing in the background")
	case <-ctx.Done():
	}
}

// loadSandboxes reads the sandbox records. It skips a directory without a valid record, which an
// interrupted removal has left; removeRemains removes such directories. It returns an error for a
// record that cannot be read.
func (a adoption) loadSandboxes() error {
	entries, err := os.ReadDir(a.runtime.paths.sandboxDir(""))
	if err != nil {
		return fmt.Errorf("read the records of sandboxes: %w", err)
	}
	for _, e := range entries {
		s := &sandbox{runtime: a.runtime}
		err := durable.ReadJSON(filepath.Join(a.runtime.paths.sandboxDir(e.Name()), "sandbox.json"), &s.rec)
		if isUnreadable(err) {
			return err
		}
		if err == nil {
			s.config, err = decodeSandboxConfig(s.rec.Config)
		}
		if err == nil && (s.rec.ID != e.Name() || s.config.GetMetadata() == nil) {
			err = errors.New("it belongs to another directory")
		}
		if err != nil {
			a.runtime.log.Warn("a sandbox's record is invalid: removing the sandbox's remains", "sandbox", e.Name(),
				"error", err)
			continue
		}
		a.runtime.sandboxes[s.rec.ID] = s
		a.runtime.names[sandboxName(s.config.Metadata)] = s.rec.ID
	}
	return nil
}

func (a adoption) loadContainers() error {
	entries, err := os.ReadDir(a.runtime.paths.containerDir(""))
	if err != nil {
		return fmt.Errorf("read the records of containers: %w", err)
	}
	for _, e := range entries {
		c := &container{runtime: a.runtime, ended: make(chan struct{})}
		err := durable.ReadJSON(filepath.Join(a.runtime.paths.containerDir(e.Name()), "container.json"), &c.rec)
		if isUnreadable(err) {
			return err
		}
		c.rec.replaceExitedState()
		c.partial = c.rec.State == ContainerCreating
		if err == nil {
			c.config, err = decodeContainerConfig(c.rec.Config)
		}
		if err == nil && (c.rec.ID != e.Name() || c.config.GetMetadata() == nil) {
			err = errors.New("it belongs to another directory")
		}
		if err != nil {
			a.runtime.log.Warn("a container's record is invalid: removing the container's remains",
				"container", e.Name(), "error", err)
			continue
		}
		a.runtime.containers[c.rec.ID] = c
		a.runtime.names[containerName(c.rec.Sandbox, c.config.Metadata)] = c.rec.ID
	}
	return nil
}

// isUnreadable reports whether err means that a record exists but cannot be read, for example after
// an I/O error. The adoption fails then, because the record may be valid.
func isUnreadable(err error) bool {
	var path *fs.PathError
	return errors.As(err, &path) && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR)
}

// adoptSandbox takes over a sandbox of an earlier agent process and its containers. If the shim
// does not respond, it returns nil and retries in the background. If the shim is gone, the sandbox
// becomes NotReady and its containers are killed. A sandbox that was only partly created is
// removed.
func (s *sandbox) adoptSandbox(ctx context.Context) error {
	r := s.runtime
	s.teardown.Lock()
	defer s.teardown.Unlock()
	r.mu.Lock()
	next, err := s.rec.State.NextState(SandboxRecover)
	r.mu.Unlock()
	if err != nil {
		return err
	}
	snap, err := s.reconnectShim(ctx)
	switch {
	case next == SandboxRemoved: // its RunPodSandbox call never returned, so no caller knows the sandbox
		return s.removeSandbox(ctx)
	case errors.Is(err, errShimNotFound):
		return s.endWithoutShim(ctx)
	case err != nil:
		r.log.Warn("the shim of a sandbox does not respond; retrying", "sandbox", s.rec.ID, "error", err)
		s.applyRecordedExits()
		r.life.background.Go(func() { s.retryReconnect() })
		return nil
	}
	return s.applySnapshot(ctx, snap)
}

// errShimNotFound is returned if a shim certainly does not exist: its socket refuses connections
// and its process is gone. Any other error means only that the shim did not respond.
var errShimNotFound = errors.New("the shim does not exist")

// helloTimeout is how long to wait for a shim's response to Hello.
const helloTimeout = 5 * time.Second

// reconnectShim connects to the shim of a sandbox and returns the shim's snapshot. It returns
// errShimNotFound if the shim certainly does not exist.
func (s *sandbox) reconnectShim(ctx context.Context) (*wire.Snapshot, error) {
	r := s.runtime
	if s.rec.Boot != r.host.BootID {
		return nil, errShimNotFound
	}
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	c, snap, err := shimclient.Connect(ctx, r.paths.sandboxDir(s.rec.ID), s.handleProcessEnd, s.handleShimLoss)
	if err != nil {
		refused := errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT)
		if refused && !isRunningProcess(s.rec.ShimPID, "keelson-shim") {
			return nil, errShimNotFound
		}
		return nil, err
	}
	r.mu.Lock()
	s.shim = c
	r.mu.Unlock()
	return snap, nil
}

// applySnapshot updates the states of a sandbox and its containers from the shim's snapshot.
func (s *sandbox) applySnapshot(ctx context.Context, snap *wire.Snapshot) error {
	if snap.PauseEnded {
		s.handlePauseLoss()
	}
	statuses := map[string]wire.Status{}
	for _, st := range snap.Containers {
		statuses[st.Container] = st
	}
	for _, c := range s.containers() {
		if err := c.adoptContainer(ctx, statuses); err != nil {
			return err
		}
	}
	return nil
}

func (c *container) adoptContainer(ctx context.Context, statuses map[string]wire.Status) error {
	r := c.runtime
	st, ok := statuses[c.rec.ID]
	switch state := c.containerState(); {
	case c.partial: // an earlier agent process was creating it
		c.operation.Lock()
		defer c.operation.Unlock()
		return c.eraseContainer(ctx)
	case state == ContainerCreating: // this process is creating it
	case c.rec.StartError != "" && state == ContainerCreated:
		return c.adoptFailedStart(statuses != nil)
	case ok && st.State == wire.StateExited:
		e := exitRecord{Code: int32(st.Exit.Code), Finished: st.Exit.Time, Started: st.Started, OOM: st.Exit.OOM}
		c.recordContainerEnd(e)
	case ok:
		r.mu.Lock()
		if c.rec.State != ContainerExited && st.State == wire.StateRunning { // it may have ended meanwhile
			c.rec.State, c.rec.Started = ContainerRunning, st.Started
		}
		r.mu.Unlock()
	default:
		c.endOrphan(ctx)
	}
	return nil
}

// applyRecordedExits marks a container as exited if the shim has recorded the exit on disk. It is
// used while the shim does not respond.
func (s *sandbox) applyRecordedExits() {
	for _, c := range s.containers() {
		if e, err := s.runtime.paths.readExitRecord(c.rec.ID); err == nil && !c.partial {
			c.recordContainerEnd(e)
		}
	}
}

// retryReconnect reconnects to a shim after the shim did not respond or the connection was lost. It
// retries until the shim responds, the shim is certainly gone, the sandbox is removed or the
// runtime stops.
func (s *sandbox) retryReconnect() {
	r := s.runtime
	const first, maxDelay = 2 * time.Millisecond, 10 * time.Second
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-r.life.stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	for pause := first; ; pause = min(2*pause, maxDelay) {
		if _, err := r.findSandbox(s.rec.ID); err != nil {
			return // the sandbox was removed
		}
		limited, cancel := context.WithTimeout(ctx, teardownTimeout)
		snap, err := s.reconnectShim(limited)
		switch {
		case err == nil:
			err = s.applySnapshot(limited, snap)
		case errors.Is(err, errShimNotFound):
			err = s.endWithoutShim(limited)
		default:
			cancel()
			select {
			case <-r.life.stopping:
				return
			case <-time.After(pause):
			}
			continue
		}
		cancel()
		if ctx.Err() != nil {
			s.disconnectShim()
		}
		if err != nil {
			r.log.Error("cannot adopt a sandbox", "sandbox", s.rec.ID, "error", err)
		}
		r.broadcastEvent(agent.RuntimeEvent{SandboxID: s.rec.ID, PodUID: podUID(s.config.GetMetadata().GetUid())})
		return
	}
}

// endWithoutShim makes a sandbox NotReady after its shim has died, and kills its containers: no
// process reaps them or holds their streams any longer.
func (s *sandbox) endWithoutShim(ctx context.Context) error {
	if s.rec.Boot == s.runtime.host.BootID {
		killIfNamed(s.rec.PausePID, "keelson-pause")
	}
	s.handlePauseLoss()
	for _, c := range s.containers() {
		if err := c.adoptContainer(ctx, nil); err != nil {
			return err
		}
	}
	return nil
}

// removeRemains removes what belongs to no recorded object: containers of unknown sandboxes,
// run-time directories, network namespaces and image volumes. It logs errors.
func (a adoption) removeRemains(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*teardownTimeout)
	defer cancel()
	logFailure := func(object string, err error) {
		if err != nil {
			a.runtime.log.Error("cannot remove remains", "object", object, "error", err)
		}
	}
	// Adoption may continue meanwhile, but it only removes entries.
	a.runtime.mu.Lock()
	var stray []*container
	sandboxes, containers := map[string]bool{}, map[string]bool{}
	for id := range a.runtime.sandboxes {
		sandboxes[id] = true
	}
	for id, c := range a.runtime.containers {
		if containers[id] = true; a.runtime.sandboxes[c.rec.Sandbox] == nil && !c.endOnly {
			stray = append(stray, c)
		}
	}
	a.runtime.mu.Unlock()
	for _, c := range stray {
		c.operation.Lock()
		logFailure("container "+c.rec.ID, c.eraseContainer(ctx))
		c.operation.Unlock()
	}
	a.removeUnknownEntries(a.runtime.paths.sandboxDir(""), sandboxes, func(path, id string) error {
		shutDownStrayShim(path)
		if err := unmountShm(path); err != nil {
			return err
		}
		return safepath.RemoveAll(path)
	}, logFailure)
	a.removeUnknownEntries(a.runtime.paths.etcDir(""), sandboxes, func(path, id string) error {
		return safepath.RemoveAll(path)
	}, logFailure)
	a.removeUnknownEntries(a.runtime.paths.netnsPath(""), sandboxes, func(path, id string) error {
		return netns.RemovePinned(path)
	}, logFailure)
	for _, dir := range []string{a.runtime.paths.containerDir(""), a.runtime.paths.imageVolumes(""),
		a.runtime.paths.libcontainerDir()} {
		a.removeUnknownEntries(dir, containers, func(path, id string) error {
			return safepath.RemoveAll(path)
		}, logFailure)
	}
}

// removeUnknownEntries calls remove for each entry of dir with a name that is not in recorded. It
// calls logFailure with the result of each call, which may be nil.
func (a adoption) removeUnknownEntries(dir string, recorded map[string]bool, remove func(path, id string) error,
	logFailure func(object string, err error)) {
	entries, err := os.ReadDir(dir)
	logFailure(dir, err)
	for _, e := range entries {
		if !recorded[e.Name()] {
			path := filepath.Join(dir, e.Name())
			logFailure(path, remove(path, e.Name()))
		}
	}
}

// shutDownStrayShim shuts down the shim in the sandbox directory dir, for which there is no sandbox
// record. It waits at most five seconds and ignores errors.
func shutDownStrayShim(dir string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, _, err := shimclient.Connect(ctx, dir, func(wire.Exited) {}, func() {})
	if err == nil {
		c.StopShim(ctx)
	}
}
