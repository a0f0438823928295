package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/bundle"
	"keelson.dev/keelson/agent/oci/containerspec"
	"keelson.dev/keelson/agent/oci/shimclient"
	"keelson.dev/keelson/agent/oci/wire"
)

// container is the runtime's state of one container: its stored record, its configuration and how
// it exited.
type container struct {
	runtime   *Runtime
	operation sync.Mutex // serializes start, remove and other changes

	rec         containerRecord // State and Started are guarded by Runtime.mu
	config      *cri.ContainerConfig
	exit        exitRecord    // guarded by Runtime.mu; valid in state ContainerExited
	ended       chan struct{} // closed when the state becomes ContainerExited
	exitUnknown atomic.Bool   // the exit code of the container is unknown
	partial     bool          // an earlier agent process did not finish its creation; constant once published
	endOnly     bool          // only its exit record is left, after a power failure; constant once published
	execCount   atomic.Int64

	// updated resources, which replace those in config; nil: never updated
	updated atomic.Pointer[cri.LinuxContainerResources]
}

func containerName(sandbox string, metadata *cri.ContainerMetadata) string {
	return fmt.Sprintf("%s/%s/%d", sandbox, metadata.GetName(), metadata.GetAttempt())
}

// CreateContainer implements agent.Runtime. A repeated request for a container that has not been
// started returns that container.
func (r *Runtime) CreateContainer(ctx context.Context,
	request *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	config := request.GetConfig()
	if config.GetMetadata().GetName() == "" {
		return nil, status.Error(codes.InvalidArgument, "container metadata needs a name")
	}
	s, err := r.findSandbox(request.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	s.teardown.RLock()
	defer s.teardown.RUnlock()
	r.mu.Lock()
	_, err = s.rec.State.NextState(SandboxCreate)
	shim := s.shim
	r.mu.Unlock()
	if err == nil && shim == nil {
		err = shimclient.ErrDisconnected
	}
	if err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "create container %s: %v", config.Metadata.Name, err)
	}
	data, err := proto.Marshal(config)
	if err != nil {
		return nil, err
	}
	id := newID()
	c := &container{runtime: r, config: config, ended: make(chan struct{}),
		rec: containerRecord{ID: id, Sandbox: s.rec.ID, State: ContainerCreating,
			Config: data, Created: time.Now().UnixNano(), Cgroup: filepath.Join(s.cgroupPath(), id)}}
	c.operation.Lock()
	defer c.operation.Unlock()
	if existing := r.reserveContainer(c); existing != nil {
		return existing.existingContainer()
	}
	if err := c.buildContainer(ctx, s, shim); err != nil {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
		defer cancel()
		if e := c.eraseContainer(cleanup); e != nil {
			r.log.Error("cannot remove a container whose creation failed", "container", id, "error", e)
		}
		return nil, fmt.Errorf("create container %s: %w", config.Metadata.Name, err)
	}
	return &cri.CreateContainerResponse{ContainerId: id}, nil
}

func (r *Runtime) reserveContainer(c *container) *container {
	r.mu.Lock()
	defer r.mu.Unlock()
	name := containerName(c.rec.Sandbox, c.config.Metadata)
	if id, taken := r.names[name]; taken {
		return r.containers[id]
	}
	r.names[name] = c.rec.ID
	r.containers[c.rec.ID] = c
	return nil
}

func (existing *container) existingContainer() (*cri.CreateContainerResponse, error) {
	r := existing.runtime
	existing.operation.Lock() // wait until the first request has returned
	defer existing.operation.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if existing.rec.State == ContainerCreated {
		return &cri.CreateContainerResponse{ContainerId: existing.rec.ID}, nil
	}
	return nil, status.Errorf(codes.AlreadyExists, "container %s with that name and attempt exists and is %s",
		existing.rec.ID, existing.rec.State)
}

// buildContainer writes the container's record, prepares its root file system, and makes the shim
// create the container with keelson-oci.
func (c *container) buildContainer(ctx context.Context, s *sandbox, shim *shimclient.Client) error {
	r := c.runtime
	id := c.rec.ID
	go r.cgroups.WarmUpMove()
	image := c.config.GetImage().GetImage()
	facts, err := r.cfg.Images.Config(ctx, image)
	if err != nil {
		return fmt.Errorf("image %s: %w", image, err)
	}
	c.updateRecord(func(rec *containerRecord) { rec.ImageID, rec.ImageRef = facts.ID, facts.Digest })
	if dir, file := s.config.GetLogDirectory(), c.config.GetLogPath(); dir != "" && file != "" {
		c.updateRecord(func(rec *containerRecord) { rec.Log = filepath.Join(dir, file) })
		if err := os.MkdirAll(filepath.Dir(c.rec.Log), 0o755); err != nil {
			return err
		}
	}
	if err := os.Mkdir(r.paths.containerDir(id), 0o711); err != nil {
		return err
	}
	rec := c.updateRecord(func(*containerRecord) {})
	if err := r.paths.saveContainer(&rec); err != nil {
		return err
	}
	stages := &stageList{}
	var root agent.RootFS
	err = stages.measureStage("rootfs", func() (err error) {
		root, err = r.cfg.Images.PrepareRootFS(ctx, id, image)
		return err
	})
	if err != nil {
		return fmt.Errorf("prepare the root file system of image %s: %w", image, err)
	}
	target, err := r.openTarget(s, c.config)
	if err != nil {
		return err
	}
	defer target.Close() // a nil file is not closed
	if err := c.writeBundle(s, facts, root, target); err != nil {
		return err
	}
	err = stages.measureStage("create", func() error { return c.createInShim(ctx, shim) })
	startError := ""
	if err != nil {
		if startError = initErrorText(err); startError == "" {
			return err
		}
	}
	rec = c.updateRecord(func(rec *containerRecord) {
		rec.StartError = startError
		if rec.State == ContainerCreating { // otherwise it has already ended
			rec.State = ContainerCreated
		}
		r.stages[id] = stages.stages
	})
	return r.paths.saveContainer(&rec)
}

// updateRecord changes a container's record under Runtime.mu and returns a copy of the record. The
// lock is necessary because the container may be marked as exited at any time, when its shim is
// lost.
func (c *container) updateRecord(change func(*containerRecord)) containerRecord {
	r := c.runtime
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&c.rec)
	return c.rec
}

// writeBundle writes the request file from which keelson-oci creates the container. target is the
// PID namespace that the container joins, from openTarget. It must stay open until the container
// exists.
func (c *container) writeBundle(s *sandbox, facts agent.ImageConfig, root agent.RootFS, target *os.File) error {
	r := c.runtime
	in := containerspec.Input{
		ID: c.rec.ID, Sandbox: s.config, Config: c.config, Image: facts, Root: root, Host: r.host,
		Cgroup: filepath.Join(r.cgroups.Root, c.rec.Cgroup),
		Controllers: containerspec.Controllers{Pids: r.cgroups.Pids, Hugetlb: r.cgroups.Hugetlb,
			Memory: r.cgroups.Controllers["memory"] != ""},
		Dirs: containerspec.Directories{Sandbox: r.paths.sandboxDir(s.rec.ID), Etc: r.paths.etcDir(s.rec.ID),
			Seccomp: filepath.Join(r.cfg.StateDir, "seccomp"), Volumes: r.paths.imageVolumes(c.rec.ID), CDI: r.cfg.CDI},
		Pause: fmt.Sprintf("/proc/%d/ns/", s.rec.PausePID),
	}
	if !s.usesHostNetwork() {
		in.NetNS = r.paths.netnsPath(s.rec.ID)
	}
	if target != nil {
		in.TargetPID = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), target.Fd())
	}
	if err := s.writeEtcFiles(); err != nil {
		return err
	}
	b, err := in.BuildRequest()
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if in.ClampedOOM {
		r.oomOnce.Do(func() { r.log.Warn("oom_score_adj cannot be lowered on this host: CAP_SYS_RESOURCE is missing") })
	}
	for _, v := range b.Volumes {
		if err := os.MkdirAll(v, 0o755); err != nil {
			return err
		}
	}
	b.StateRoot = r.paths.libcontainerDir()
	c.updateRecord(func(rec *containerRecord) {
		rec.Process, rec.Stop, rec.SharePID = b.Spec.Process, in.StopSignal(), !in.HasOwnPIDNamespace()
	})
	data, err := json.Marshal(b)
	if err != nil {
		return err
	}
	return os.WriteFile(r.paths.bundlePath(c.rec.ID), data, 0o600)
}

func (l layout) bundlePath(id string) string {
	return filepath.Join(l.containerDir(id), "create.json")
}

func (c *container) createInShim(ctx context.Context, shim *shimclient.Client) error {
	r := c.runtime
	id := c.rec.ID
	note, err := endNote(c.rec, c.config)
	if err != nil {
		return err
	}
	m := wire.Create{Container: id, EndFile: r.paths.endFile(id), EndNote: note, OCI: r.cfg.OCIPath,
		Bundle: r.paths.bundlePath(id), Log: c.rec.Log, LogSize: r.cfg.LogMaxSize,
		LogFiles: int64(r.cfg.LogMaxFiles), ExitFile: r.paths.exitFile(id), OOMFile: r.cgroups.OomFile(c.rec.Cgroup),
		TTY: c.config.GetTty(), Stdin: c.config.GetStdin(), StdinOnce: c.config.GetStdinOnce()}
	f, err := shim.CallShim(ctx, wire.KindCreate, &m)
	if err != nil {
		return err
	}
	st, err := shim.DecodeStarted(f)
	if err != nil {
		return err
	}
	var answer bundle.ResolvedUser
	if err := json.Unmarshal([]byte(st.Result), &answer); err != nil {
		return fmt.Errorf("decode keelson-oci's response: %w", err)
	}
	c.updateRecord(func(rec *containerRecord) {
		rec.User = answer
		rec.Process.User.UID, rec.Process.User.GID, rec.Process.User.AdditionalGids = answer.UID, answer.GID,
			answer.Groups
	})
	return nil
}

// lockContainer waits until adoption has finished, and then returns the container with this ID with
// its mutex operation locked. The caller must unlock it.
func (r *Runtime) lockContainer(ctx context.Context, id string) (*container, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	c, err := r.findContainer(id)
	if err != nil {
		return nil, err
	}
	c.operation.Lock()
	return c, nil
}

// StartContainer implements agent.Runtime. It succeeds if the container already runs.
func (r *Runtime) StartContainer(ctx context.Context,
	request *cri.StartContainerRequest) (*cri.StartContainerResponse, error) {
	c, err := r.lockContainer(ctx, request.GetContainerId())
	if err != nil {
		return nil, err
	}
	defer c.operation.Unlock()
	r.mu.Lock()
	state, startError := c.rec.State, c.rec.StartError
	s := r.sandboxes[c.rec.Sandbox]
	var shim *shimclient.Client
	attached := false
	if s != nil {
		shim, attached = s.shim, s.rec.State != SandboxPrepared
	}
	r.mu.Unlock()
	switch {
	case state == ContainerRunning:
		return &cri.StartContainerResponse{}, nil
	case state != ContainerCreated:
		return nil, status.Errorf(codes.FailedPrecondition, "start container %s: it is %s", c.rec.ID, state)
	case shim == nil:
		return nil, status.Errorf(codes.FailedPrecondition, "start container %s: %v",
			c.rec.ID, shimclient.ErrDisconnected)
	case !attached:
		return nil, status.Errorf(codes.FailedPrecondition,
			"start container %s: the network of its sandbox is not attached yet", c.rec.ID)
	}
	if startError != "" {
		if err := c.failStart(); err != nil {
			return nil, fmt.Errorf("start container %s: %w", c.rec.ID, err)
		}
		return nil, fmt.Errorf("failed to start container %q: %s", c.config.GetMetadata().GetName(), startError)
	}
	start := time.Now()
	m := wire.Start{Container: c.rec.ID, Fifo: filepath.Join(r.paths.libcontainerDir(), c.rec.ID, "exec.fifo")}
	d, err := shim.CallDone(ctx, wire.KindStart, &m)
	if err != nil {
		return nil, fmt.Errorf("start container %s: %w", c.rec.ID, err)
	}
	r.mu.Lock()
	c.rec.Started = d.Time
	if c.rec.State == ContainerCreated {
		c.rec.State = ContainerRunning
	}
	rec := c.rec
	r.stages[c.rec.ID] = append(r.stages[c.rec.ID], agent.StageTime{Name: "start", Start: start,
		Duration: time.Since(start)})
	r.mu.Unlock()
	if err := r.paths.saveContainer(&rec); err != nil {
		return nil, err
	}
	c.announceContainer()
	return &cri.StartContainerResponse{}, nil
}

func (c *container) announceContainer() {
	r := c.runtime
	e := agent.RuntimeEvent{SandboxID: c.rec.Sandbox, ContainerID: c.rec.ID}
	if s, err := r.findSandbox(c.rec.Sandbox); err == nil {
		e.PodUID = podUID(s.config.GetMetadata().GetUid())
	}
	r.broadcastEvent(e)
}

// recordContainerEnd sets the container's state to exited and sends an event. If the container
// shares a PID namespace, its child processes survive its first process, so it kills them in the
// background. Only the first call for a container has an effect.
func (c *container) recordContainerEnd(exit exitRecord) {
	r := c.runtime
	r.mu.Lock()
	if c.rec.State == ContainerExited {
		r.mu.Unlock()
		return
	}
	c.rec.State = ContainerExited
	if c.rec.Started == 0 {
		c.rec.Started = exit.Started
	}
	c.exit = exit
	sharePID := c.rec.SharePID
	c.queueEndSync()
	r.mu.Unlock()
	if sharePID {
		// Its child processes survive in a PID namespace that it shares.
		r.life.background.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), teardownTimeout)
			defer cancel()
			if err := r.cgroups.KillProcesses(ctx, c.rec.Cgroup); err != nil {
				r.log.Error("cannot kill the remaining processes of an ended container", "container", c.rec.ID,
					"error", err)
			}
		})
	}
	close(c.ended)
	c.announceContainer()
}

func (l layout) readExitRecord(id string) (exitRecord, error) {
	b, err := os.ReadFile(l.exitFile(id))
	if errors.Is(err, os.ErrNotExist) {
		b, err = os.ReadFile(l.endFile(id))
	}
	if err != nil {
		return exitRecord{}, err
	}
	return parseExitRecord(b)
}
