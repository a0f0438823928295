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
	"keelson.dev/keelson/agent/oci/wire"
)

// ctr is one container.
type ctr struct {
	op sync.Mutex // serializes start, remove and other changes

	rec    containerRecord // State and Started are guarded by Runtime.mu
	config *cri.ContainerConfig
	exit   exitRecord    // guarded by Runtime.mu; valid in ContainerExited
	ended  chan struct{} // closed in ContainerExited
	lost   atomic.Bool   // its exit code is unknown
	half   bool          // partly created by an earlier agent process; constant once published
	past   bool          // only its end is known, from before a power failure; constant once published
	execs  atomic.Int64

	updated atomic.Pointer[cri.LinuxContainerResources] // updated resources, which replace those in config; nil: never updated
}

func containerName(sandbox string, m *cri.ContainerMetadata) string {
	return fmt.Sprintf("%s/%s/%d", sandbox, m.GetName(), m.GetAttempt())
}

// CreateContainer implements agent.Runtime. A repeated request for a container that has not been
// started returns that container.
func (r *Runtime) CreateContainer(ctx context.Context, q *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error) {
	if err := r.wait(ctx); err != nil {
		return nil, err
	}
	config := q.GetConfig()
	if config.GetMetadata().GetName() == "" {
		return nil, status.Error(codes.InvalidArgument, "container metadata needs a name")
	}
	s, err := r.sandbox(q.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	s.op.RLock()
	defer s.op.RUnlock()
	r.mu.Lock()
	_, err = s.rec.State.Next(SandboxCreate)
	shim := s.shim
	r.mu.Unlock()
	if err == nil && shim == nil {
		err = errShimGone
	}
	if err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "create container %s: %v", config.Metadata.Name, err)
	}
	data, err := proto.Marshal(config)
	if err != nil {
		return nil, err
	}
	id := newID()
	c := &ctr{config: config, ended: make(chan struct{}), rec: containerRecord{ID: id, Sandbox: s.rec.ID, State: ContainerCreating,
		Config: data, Created: time.Now().UnixNano(), Cgroup: filepath.Join(s.cgroup(), id)}}
	c.op.Lock()
	defer c.op.Unlock()
	if existing := r.reserveContainer(c); existing != nil {
		return r.sameContainer(existing)
	}
	if err := r.createSteps(ctx, s, shim, c); err != nil {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
		defer cancel()
		if e := r.eraseContainer(cleanup, c); e != nil {
			r.log.Error("a failed container could not be removed", "container", id, "error", e)
		}
		return nil, fmt.Errorf("create container %s: %w", config.Metadata.Name, err)
	}
	return &cri.CreateContainerResponse{ContainerId: id}, nil
}

func (r *Runtime) reserveContainer(c *ctr) *ctr {
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

func (r *Runtime) sameContainer(existing *ctr) (*cri.CreateContainerResponse, error) {
	existing.op.Lock() // wait until the first request has returned
	defer existing.op.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if existing.rec.State == ContainerCreated {
		return &cri.CreateContainerResponse{ContainerId: existing.rec.ID}, nil
	}
	return nil, status.Errorf(codes.AlreadyExists, "container %s of that name and attempt exists and is %s", existing.rec.ID, existing.rec.State)
}

// createSteps writes the container's record, prepares its root file system, and has the shim create
// it with keelson-oci.
func (r *Runtime) createSteps(ctx context.Context, s *sandbox, shim *shimClient, c *ctr) error {
	id := c.rec.ID
	go r.cgroups.warm()
	image := c.config.GetImage().GetImage()
	facts, err := r.cfg.Images.Config(ctx, image)
	if err != nil {
		return fmt.Errorf("image %s: %w", image, err)
	}
	r.amend(c, func(rec *containerRecord) { rec.ImageID, rec.ImageRef = facts.ID, facts.Digest })
	if dir, file := s.config.GetLogDirectory(), c.config.GetLogPath(); dir != "" && file != "" {
		r.amend(c, func(rec *containerRecord) { rec.Log = filepath.Join(dir, file) })
		if err := os.MkdirAll(filepath.Dir(c.rec.Log), 0o755); err != nil {
			return err
		}
	}
	if err := os.Mkdir(r.containerDir(id), 0o711); err != nil {
		return err
	}
	rec := r.amend(c, func(*containerRecord) {})
	if err := r.saveContainer(&rec); err != nil {
		return err
	}
	stages := &stageList{}
	var root agent.RootFS
	err = stages.time("rootfs", func() (err error) {
		root, err = r.cfg.Images.PrepareRootFS(ctx, id, image)
		return err
	})
	if err != nil {
		return fmt.Errorf("prepare the root file system of image %s: %w", image, err)
	}
	if err := r.writeBundle(s, c, facts, root); err != nil {
		return err
	}
	err = stages.time("create", func() error { return r.shimCreate(ctx, shim, c) })
	startError := ""
	if err != nil {
		if startError = initError(err); startError == "" {
			return err
		}
	}
	rec = r.amend(c, func(rec *containerRecord) {
		rec.StartError = startError
		if rec.State == ContainerCreating { // otherwise it has already ended
			rec.State = ContainerCreated
		}
		r.stages[id] = stages.list
	})
	return r.saveContainer(&rec)
}

// amend changes a container's record under the lock and returns a copy. Another goroutine may end
// the container at any time, when its shim is lost.
func (r *Runtime) amend(c *ctr, change func(*containerRecord)) containerRecord {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&c.rec)
	return c.rec
}

// writeBundle writes the request file for keelson-oci.
func (r *Runtime) writeBundle(s *sandbox, c *ctr, facts agent.ImageConfig, root agent.RootFS) error {
	in := specInput{
		id: c.rec.ID, sandbox: s.config, config: c.config, image: facts, root: root, host: r.host,
		cgroup: filepath.Join(r.cgroups.root, c.rec.Cgroup), hasPids: r.cgroups.pids, hasHugetlb: r.cgroups.hugetlb,
		hasMemory:    r.cgroups.controllers["memory"] != "",
		sandboxFiles: r.sandboxDir(s.rec.ID), etc: r.etcDir(s.rec.ID), seccompDir: filepath.Join(r.cfg.StateDir, "seccomp"),
		volumes: r.imageVolumes(c.rec.ID), cdi: r.cfg.CDI,
		pause: fmt.Sprintf("/proc/%d/ns/", s.rec.PausePID),
	}
	if !s.hostNetwork() {
		in.netns = r.netnsPath(s.rec.ID)
	}
	if ns := c.config.GetLinux().GetSecurityContext().GetNamespaceOptions(); ns.GetPid() == cri.NamespaceMode_TARGET {
		pid, err := r.targetPID(ns.GetTargetId())
		if err != nil {
			return err
		}
		in.targetPID = pid
	}
	if err := r.etcFiles(s); err != nil {
		return err
	}
	b, err := in.build()
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if in.clampedOOM {
		r.oomOnce.Do(func() { r.log.Warn("oom_score_adj cannot be lowered on this host: CAP_SYS_RESOURCE is missing") })
	}
	for _, v := range b.Volumes {
		if err := os.MkdirAll(v, 0o755); err != nil {
			return err
		}
	}
	b.StateRoot = r.libcontainerDir()
	r.amend(c, func(rec *containerRecord) {
		rec.Process, rec.Stop, rec.SharePID = b.Spec.Process, in.stopSignal(), !in.ownPID()
	})
	data, err := json.Marshal(b)
	if err != nil {
		return err
	}
	return os.WriteFile(r.bundlePath(c.rec.ID), data, 0o600)
}

func (r *Runtime) bundlePath(id string) string {
	return filepath.Join(r.containerDir(id), "create.json")
}

// targetPID returns the PID of a process of a running container. A debug container joins its PID
// namespace.
func (r *Runtime) targetPID(id string) (int, error) {
	c, err := r.container(id)
	if err != nil {
		return 0, err
	}
	if pids := r.cgroups.procs(c.rec.Cgroup); len(pids) > 0 {
		return pids[0], nil
	}
	return 0, status.Errorf(codes.FailedPrecondition, "target container %s is not running", id)
}

func (r *Runtime) shimCreate(ctx context.Context, shim *shimClient, c *ctr) error {
	id := c.rec.ID
	note, err := endNote(c.rec, c.config)
	if err != nil {
		return err
	}
	m := wire.Create{Container: id, EndFile: r.endFile(id), EndNote: note, OCI: r.cfg.OCIPath, Bundle: r.bundlePath(id),
		Log: c.rec.Log, LogSize: r.cfg.LogMaxSize,
		LogFiles: int64(r.cfg.LogMaxFiles), ExitFile: r.exitFile(id), OOMFile: r.cgroups.oomFile(c.rec.Cgroup),
		TTY: c.config.GetTty(), Stdin: c.config.GetStdin(), StdinOnce: c.config.GetStdinOnce()}
	f, err := shim.call(ctx, wire.KindCreate, &m)
	if err != nil {
		return err
	}
	st, err := shim.begun(f)
	if err != nil {
		return err
	}
	var answer bundle.Answer
	if err := json.Unmarshal([]byte(st.Result), &answer); err != nil {
		return fmt.Errorf("read keelson-oci's answer: %w", err)
	}
	r.amend(c, func(rec *containerRecord) {
		rec.User = answer
		rec.Process.User.UID, rec.Process.User.GID, rec.Process.User.AdditionalGids = answer.UID, answer.GID, answer.Groups
	})
	return nil
}

// lockContainer waits until adoption has finished, then finds a container and locks its op.
func (r *Runtime) lockContainer(ctx context.Context, id string) (*ctr, error) {
	if err := r.wait(ctx); err != nil {
		return nil, err
	}
	c, err := r.container(id)
	if err != nil {
		return nil, err
	}
	c.op.Lock()
	return c, nil
}

// StartContainer implements agent.Runtime. It succeeds if the container already runs.
func (r *Runtime) StartContainer(ctx context.Context, q *cri.StartContainerRequest) (*cri.StartContainerResponse, error) {
	c, err := r.lockContainer(ctx, q.GetContainerId())
	if err != nil {
		return nil, err
	}
	defer c.op.Unlock()
	r.mu.Lock()
	state, startError := c.rec.State, c.rec.StartError
	s := r.sandboxes[c.rec.Sandbox]
	var shim *shimClient
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
		return nil, status.Errorf(codes.FailedPrecondition, "start container %s: %v", c.rec.ID, errShimGone)
	case !attached:
		return nil, status.Errorf(codes.FailedPrecondition, "start container %s: the network of its sandbox is not attached yet", c.rec.ID)
	}
	if startError != "" {
		if err := r.failStart(c); err != nil {
			return nil, fmt.Errorf("start container %s: %w", c.rec.ID, err)
		}
		return nil, fmt.Errorf("failed to start container %q: %s", c.config.GetMetadata().GetName(), startError)
	}
	begin := time.Now()
	m := wire.Start{Container: c.rec.ID, Fifo: filepath.Join(r.libcontainerDir(), c.rec.ID, "exec.fifo")}
	d, err := shim.done(ctx, wire.KindStart, &m)
	if err != nil {
		return nil, fmt.Errorf("start container %s: %w", c.rec.ID, err)
	}
	r.mu.Lock()
	c.rec.Started = d.Time
	if c.rec.State == ContainerCreated {
		c.rec.State = ContainerRunning
	}
	rec := c.rec
	r.stages[c.rec.ID] = append(r.stages[c.rec.ID], agent.StageTime{Name: "start", Start: begin, Duration: time.Since(begin)})
	r.mu.Unlock()
	if err := r.saveContainer(&rec); err != nil {
		return nil, err
	}
	r.announceContainer(c)
	return &cri.StartContainerResponse{}, nil
}

func (r *Runtime) announceContainer(c *ctr) {
	e := agent.RuntimeEvent{SandboxID: c.rec.Sandbox, ContainerID: c.rec.ID}
	if s, err := r.sandbox(c.rec.Sandbox); err == nil {
		e.PodUID = podUID(s.config.GetMetadata().GetUid())
	}
	r.announce(e)
}

// containerEnded records how a container ended and announces it. Only the first call for a
// container has an effect.
func (r *Runtime) containerEnded(c *ctr, e exitRecord) {
	r.mu.Lock()
	if c.rec.State == ContainerExited {
		r.mu.Unlock()
		return
	}
	c.rec.State = ContainerExited
	if c.rec.Started == 0 {
		c.rec.Started = e.Started
	}
	c.exit = e
	sharePID := c.rec.SharePID
	r.endsSoon(c)
	r.mu.Unlock()
	if sharePID {
		// Its child processes survive in a PID namespace that it shares.
		r.background.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), teardownTimeout)
			defer cancel()
			if err := r.cgroups.kill(ctx, c.rec.Cgroup); err != nil {
				r.log.Error("processes outlive their container", "container", c.rec.ID, "error", err)
			}
		})
	}
	close(c.ended)
	r.announceContainer(c)
}

func (r *Runtime) readExit(id string) (exitRecord, error) {
	b, err := os.ReadFile(r.exitFile(id))
	if errors.Is(err, os.ErrNotExist) {
		b, err = os.ReadFile(r.endFile(id))
	}
	if err != nil {
		return exitRecord{}, err
	}
	return parseExit(b)
}
