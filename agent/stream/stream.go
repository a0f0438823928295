// Package stream serves the requests that the control plane sends to a node through its session:
// exec, attach, container logs and port-forward. It implements agent.NodeServer with the runtime's
// methods and its log files in CRI format.
//
// Following a log uses inotify and events of the runtime. It polls only if no inotify instance or
// watch is available.
package stream

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Server serves exec, attach, logs, port-forward and dial requests for this node. It implements
// agent.NodeServer.
type Server struct {
	runtime agent.Runtime
	objects agent.Objects
	logs    string
	watcher folderWatcher
}

var _ agent.NodeServer = (*Server)(nil)

// New returns a server for the containers of runtime. Their logs are below the folder logs
// (agent.Paths.Logs). objects provides the reason why a container is waiting, for error messages.
func New(runtime agent.Runtime, objects agent.Objects, logs string) *Server {
	return &Server{runtime: runtime, objects: objects, logs: logs}
}

// containerInstances returns all instances of a pod's container, newest first. If the container
// name is empty, it returns the instances of all containers of the pod.
func (s *Server) containerInstances(ctx context.Context, pod types.UID, name string) ([]*cri.Container, error) {
	res, err := s.runtime.ListContainers(ctx,
		&cri.ListContainersRequest{
			Filter: &cri.ContainerFilter{LabelSelector: map[string]string{agent.LabelPodUID: string(pod)}}})
	if err != nil {
		return nil, fmt.Errorf("looking for container %q of pod %s: %w", name, pod, err)
	}
	out := slices.DeleteFunc(res.Containers, func(c *cri.Container) bool {
		return name != "" && c.GetMetadata().GetName() != name
	})
	slices.SortFunc(out, func(a, b *cri.Container) int {
		return cmp.Or(cmp.Compare(b.GetMetadata().GetAttempt(), a.GetMetadata().GetAttempt()),
			cmp.Compare(b.CreatedAt, a.CreatedAt))
	})
	return out, nil
}

// Exec runs a command in a running container of the pod, or attaches to the container's streams if
// attach is true. It implements agent.NodeServer.
func (s *Server) Exec(
	ctx context.Context, pod types.UID, container string, command []string, attach, tty bool, st agent.Streams,
) error {
	all, err := s.containerInstances(ctx, pod, container)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(c *cri.Container) bool { return c.State == cri.ContainerState_CONTAINER_RUNNING })
	if i < 0 {
		return fmt.Errorf("container not found (%q)", container)
	}
	if attach {
		return s.runtime.Attach(ctx, all[i].Id, tty, st)
	}
	return s.runtime.Exec(ctx, all[i].Id, command, tty, st)
}

// PortForward connects conn to a port on localhost in the pod's sandbox. It implements
// agent.NodeServer.
func (s *Server) PortForward(ctx context.Context, pod types.UID, port int32, conn io.ReadWriteCloser) error {
	res, err := s.runtime.ListPodSandbox(ctx,
		&cri.ListPodSandboxRequest{
			Filter: &cri.PodSandboxFilter{LabelSelector: map[string]string{agent.LabelPodUID: string(pod)}}})
	if err != nil {
		return fmt.Errorf("looking for the sandbox of pod %s: %w", pod, err)
	}
	for _, sb := range res.Items {
		if sb.State == cri.PodSandboxState_SANDBOX_READY {
			return s.runtime.PortForward(ctx, sb.Id, port, conn)
		}
	}
	return fmt.Errorf("pod %s has no running sandbox to forward port %d to", pod, port)
}

// Logs writes the part of a container's log that the request selects to w. It implements
// agent.NodeServer.
func (s *Server) Logs(ctx context.Context, q agent.LogRequest, w io.Writer) error {
	all, err := s.containerInstances(ctx, q.PodUID, q.Container)
	if err != nil {
		return err
	}
	which := 0
	if q.Previous {
		which = 1
	}
	if len(all) > 0 && all[0].State == cri.ContainerState_CONTAINER_CREATED && !q.Previous && len(all) == 1 {
		all = nil
	}
	if len(all) <= which {
		if q.Previous {
			return fmt.Errorf("previous terminated container %q in pod %q not found", q.Container, q.Pod)
		}
		return fmt.Errorf("container %q in pod %q is waiting to start: %s", q.Container, q.Pod, s.waitingReason(q))
	}
	c := all[which]
	path, running, err := s.logFile(ctx, q, c)
	if err != nil {
		return err
	}
	q.Follow = q.Follow && running
	if !q.Follow {
		return s.copyLog(ctx, path, q, w, nil)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return s.copyLog(ctx, path, q, w, s.containerEnded(ctx, c.Id))
}

func (s *Server) waitingReason(q agent.LogRequest) string {
	if p, ok := s.objects.Pod(q.PodUID); ok {
		for _, st := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses,
			p.Status.EphemeralContainerStatuses) {
			if st.Name == q.Container && st.State.Waiting != nil {
				return st.State.Waiting.Reason
			}
		}
	}
	return "ContainerCreating"
}

func (s *Server) logFile(ctx context.Context, q agent.LogRequest, c *cri.Container) (
	path string, running bool, err error,
) {
	st, err := s.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.Id})
	if err != nil {
		return "", false, fmt.Errorf("looking for the log of container %q of pod %s/%s: %w", q.Container,
			q.Namespace, q.Pod, err)
	}
	running = st.GetStatus().GetState() == cri.ContainerState_CONTAINER_RUNNING
	path = st.GetStatus().GetLogPath()
	if path == "" {
		path = filepath.Join(q.Container, strconv.FormatUint(uint64(c.GetMetadata().GetAttempt()), 10)+".log")
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join(s.logs, q.Namespace+"_"+q.Pod+"_"+string(q.PodUID), path)
	}
	return path, running, nil
}

// recheckInterval is how often containerEnded checks the container, in case an event of the runtime
// was lost.
const recheckInterval = 10 * time.Second

// containerEnded returns a channel that is closed when the container with this ID has exited or no
// longer exists.
func (s *Server) containerEnded(ctx context.Context, id string) <-chan struct{} {
	done := make(chan struct{})
	events := s.runtime.Events(ctx)
	go func() {
		defer close(done)
		t := time.NewTicker(recheckInterval)
		defer t.Stop()
		for {
			st, err := s.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id})
			if ctx.Err() != nil || err != nil || st.GetStatus().GetState() != cri.ContainerState_CONTAINER_RUNNING {
				return
			}
			for again := false; !again; {
				select {
				case <-ctx.Done():
					return
				case e, ok := <-events:
					if !ok {
						events = nil
					}
					again = e.ContainerID == id
				case <-t.C:
					again = true
				}
			}
		}
	}()
	return done
}
