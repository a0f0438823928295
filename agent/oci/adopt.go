package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"keelson.dev/keelson/agent/oci/wire"
)

// adopt finds what an earlier run left. Sandboxes and containers whose making was
// never finished are removed; the others are taken over from their shims, or ended
// where there is no shim any more. What has no record is nobody's and goes.
func (r *Runtime) adopt(ctx context.Context) error {
	if err := r.loadSandboxes(); err != nil {
		return err
	}
	if err := r.loadContainers(); err != nil {
		return err
	}
	r.mu.Lock()
	all := make([]*sandbox, 0, len(r.sandboxes))
	for _, s := range r.sandboxes {
		all = append(all, s)
	}
	r.mu.Unlock()
	keep := []string{}
	for _, s := range all {
		limited, cancel := context.WithTimeout(ctx, teardownTimeout)
		err := r.adoptSandbox(limited, s)
		cancel()
		if err != nil {
			// The pod worker will stop and remove it; that tries again.
			r.log.Error("a sandbox could not be adopted", "sandbox", s.rec.ID, "error", err)
		}
		if _, err := r.sandbox(s.rec.ID); err == nil {
			keep = append(keep, s.rec.ID)
		}
	}
	r.sweep(ctx)
	if err := r.cfg.Network.GC(ctx, keep); err != nil {
		r.log.Error("networks of lost sandboxes could not be given back", "error", err)
	}
	return ctx.Err()
}

// loadSandboxes reads the records. A folder without one is left from a removal that was
// cut short: sweep removes the rest.
func (r *Runtime) loadSandboxes() error {
	entries, err := os.ReadDir(r.sandboxDir(""))
	if err != nil {
		return fmt.Errorf("read the records of sandboxes: %w", err)
	}
	for _, e := range entries {
		s := &sandbox{}
		err := loadJSON(filepath.Join(r.sandboxDir(e.Name()), "sandbox.json"), &s.rec)
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
		err := loadJSON(filepath.Join(r.containerDir(e.Name()), "container.json"), &c.rec)
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

// adoptSandbox takes over one sandbox and its containers.
func (r *Runtime) adoptSandbox(ctx context.Context, s *sandbox) error {
	s.op.Lock()
	defer s.op.Unlock()
	snap := r.joinShim(ctx, s)
	r.mu.Lock() // the shim may tell of an end at any time from here on
	state := s.rec.State
	next, err := state.Next(SandboxRecover)
	r.mu.Unlock()
	if err != nil {
		return err
	}
	if state == SandboxReady && (snap == nil || snap.PauseEnded) {
		if snap == nil {
			killIfNamed(s.rec.PausePID, "keelson-pause")
		}
		if err := r.setSandbox(s, SandboxLost); err != nil {
			return err
		}
	}
	known := map[string]wire.Status{}
	if snap != nil {
		for _, st := range snap.Containers {
			known[st.Container] = st
		}
	}
	for _, c := range r.containersOf(s.rec.ID) {
		st, ok := known[c.rec.ID]
		if err := r.adoptContainer(ctx, c, st, ok); err != nil {
			return err
		}
	}
	if next == SandboxRemoved {
		return r.dropSandbox(ctx, s)
	}
	return nil
}

// joinShim connects to the shim of an earlier run; nil when there is none.
func (r *Runtime) joinShim(ctx context.Context, s *sandbox) *wire.Snapshot {
	if s.rec.Boot != r.host.boot {
		return nil
	}
	c, snap, err := connectShim(ctx, r.sandboxDir(s.rec.ID), func(e wire.Exited) { r.processEnded(s, e) }, func() { r.shimLost(s) })
	if err != nil {
		return nil
	}
	r.mu.Lock()
	s.shim = c
	r.mu.Unlock()
	return snap
}

func (r *Runtime) adoptContainer(ctx context.Context, c *ctr, st wire.Status, known bool) error {
	if r.stateOf(c) == ContainerCreating {
		c.op.Lock()
		defer c.op.Unlock()
		return r.eraseContainer(ctx, c)
	}
	switch {
	case known && st.State == wire.StateExited:
		r.containerEnded(c, exitRecord{Code: int32(st.Exit.Code), Finished: st.Exit.Time, Started: st.Started, OOM: st.Exit.OOM})
	case known:
		r.mu.Lock()
		if c.rec.State != ContainerExited && st.State == wire.StateRunning { // it may have ended since
			c.rec.State, c.rec.Started = ContainerRunning, st.Started
		}
		r.mu.Unlock()
	default:
		r.orphanEnded(ctx, c)
	}
	return nil
}

// sweep removes what no record speaks of: containers of no sandbox, run-time
// folders, namespaces, cgroups and root file systems of nothing.
func (r *Runtime) sweep(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*teardownTimeout)
	defer cancel()
	complain := func(what string, err error) {
		if err != nil {
			r.log.Error("a leftover resists", "what", what, "error", err)
		}
	}
	r.mu.Lock()
	var stray []*ctr
	for _, c := range r.containers {
		if r.sandboxes[c.rec.Sandbox] == nil {
			stray = append(stray, c)
		}
	}
	r.mu.Unlock()
	for _, c := range stray {
		c.op.Lock()
		complain("container "+c.rec.ID, r.eraseContainer(ctx, c))
		c.op.Unlock()
	}
	r.sweepFolder(r.sandboxDir(""), r.sandboxes, func(path, id string) error {
		killShimOf(path)
		if err := unmountShm(path); err != nil {
			return err
		}
		return os.RemoveAll(path)
	}, complain)
	r.sweepFolder(r.netnsPath(""), r.sandboxes, func(path, id string) error { return removeNetns(path) }, complain)
	known := map[string]*sandbox{}
	for id := range r.containers {
		known[id] = nil
	}
	for _, dir := range []string{r.containerDir(""), r.imageVolumes(""), r.libcontainerDir()} {
		r.sweepFolder(dir, known, func(path, id string) error { return os.RemoveAll(path) }, complain)
	}
}

// sweepFolder calls remove for the entries of dir that are not known.
func (r *Runtime) sweepFolder(dir string, known map[string]*sandbox, remove func(path, id string) error, complain func(string, error)) {
	entries, err := os.ReadDir(dir)
	complain(dir, err)
	for _, e := range entries {
		if _, ok := known[e.Name()]; !ok {
			path := filepath.Join(dir, e.Name())
			complain(path, remove(path, e.Name()))
		}
	}
}

// killShimOf ends a shim that nobody has a record of.
func killShimOf(dir string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, _, err := connectShim(ctx, dir, func(wire.Exited) {}, func() {})
	if err == nil {
		c.shutdown(ctx)
	}
}
