package pod

import (
	"cmp"
	"context"
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/criconfig"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

// podRuntime queries and creates the pod's sandboxes and containers in the runtime. Its fields are
// guarded by worker.mu.
type podRuntime struct {
	w     *worker
	ended map[string]lifecycle.Container // by container ID: containers with a final status
	times observationTimes
	early *earlySandbox // the latest sandbox created before its network was set up; may be nil
}

// observeRuntime queries the runtime for the pod's sandboxes and containers. ok is false if the
// runtime returned an error.
func (pr *podRuntime) observeRuntime(ctx context.Context) (observed lifecycle.Observed, ok bool) {
	sel := map[string]string{agent.LabelPodUID: string(pr.w.desiredPod().UID)}
	sbs, err := pr.w.cfg.Deps.Runtime.ListPodSandbox(ctx,
		&cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{LabelSelector: sel}})
	if err != nil {
		pr.logObserveError(ctx, "listing sandboxes", err)
		return observed, false
	}
	for _, sb := range sbs.Items {
		s := lifecycle.Sandbox{ID: sb.Id, Attempt: sb.GetMetadata().GetAttempt(),
			Ready: sb.State == cri.PodSandboxState_SANDBOX_READY, Created: time.Unix(0, sb.CreatedAt)}
		if s.Ready {
			st, err := pr.w.cfg.Deps.Runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: sb.Id})
			if err != nil {
				pr.logObserveError(ctx, "querying the status of sandbox "+sb.Id, err)
				return observed, false
			}
			s.IPs = sandboxIPs(st.GetStatus())
			s.HostNet = st.GetStatus().GetLinux().GetNamespaces().GetOptions().GetNetwork() == cri.NamespaceMode_NODE ||
				pr.w.desiredPod().Spec.HostNetwork
			s.Ready = st.GetStatus().GetState() == cri.PodSandboxState_SANDBOX_READY
		}
		pr.w.mu.Lock()
		if pr.times.created[sb.Id].IsZero() {
			pr.times.created[sb.Id] = monotonicTime(s.Created, time.Time{}, pr.w.cfg.currentTime())
		}
		s.MonotonicCreated = pr.times.created[sb.Id]
		pr.w.mu.Unlock()
		observed.Sandboxes = append(observed.Sandboxes, s)
	}
	slices.SortFunc(observed.Sandboxes, func(a, b lifecycle.Sandbox) int {
		return cmp.Or(cmp.Compare(b.Attempt, a.Attempt), b.Created.Compare(a.Created))
	})
	cs, err := pr.w.cfg.Deps.Runtime.ListContainers(ctx,
		&cri.ListContainersRequest{Filter: &cri.ContainerFilter{LabelSelector: sel}})
	if err != nil {
		pr.logObserveError(ctx, "listing containers", err)
		return observed, false
	}
	for _, c := range cs.Containers {
		seen, err := pr.observeContainer(ctx, c)
		if err != nil {
			pr.logObserveError(ctx, "querying the status of container "+c.Id, err)
			return observed, false
		}
		observed.Containers = append(observed.Containers, seen)
	}
	slices.SortFunc(observed.Containers, func(a, b lifecycle.Container) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(b.Attempt, a.Attempt),
			b.Times.Created.Compare(a.Times.Created))
	})
	return observed, true
}

func (pr *podRuntime) logObserveError(ctx context.Context, operation string, err error) {
	if ctx.Err() == nil {
		pr.w.log.Warn("cannot observe the pod", "operation", operation, "err", err)
	}
}

// observeContainer completes a listed container with its status. The status of an ended container
// never changes and is cached.
func (pr *podRuntime) observeContainer(ctx context.Context, listed *cri.Container) (lifecycle.Container, error) {
	if listed.State == cri.ContainerState_CONTAINER_EXITED {
		pr.w.mu.Lock()
		seen, ok := pr.ended[listed.Id]
		pr.w.mu.Unlock()
		if ok {
			return seen, nil
		}
	}
	start := pr.w.cfg.currentTime()
	res, err := pr.w.cfg.Deps.Runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: listed.Id})
	if err != nil {
		return lifecycle.Container{}, err
	}
	st := res.Status
	out := lifecycle.Container{ID: listed.Id, Sandbox: listed.PodSandboxId, Name: st.GetMetadata().GetName(),
		Attempt: st.GetMetadata().GetAttempt(), Times: lifecycle.InstanceTimes{Created: unixNanoTime(st.CreatedAt),
			Started: unixNanoTime(st.StartedAt), Finished: unixNanoTime(st.FinishedAt)},
		ExitCode: st.ExitCode, Reason: st.Reason, Message: st.Message, Image: lifecycle.InstanceImage{ID: st.ImageRef},
		Hash: st.Annotations[criconfig.AnnotationHash], Delay: lifecycle.NoDelay, Limits: st.GetResources().GetLinux(),
		Process: lifecycle.InstanceProcess{User: criconfig.ContainerUser(st.GetUser()),
			StopSignal: criconfig.SignalFromCRI(st.GetStopSignal())}}
	if out.Image.Name = st.GetImage().GetUserSpecifiedImage(); out.Image.Name == "" {
		out.Image.Name = st.GetImage().GetImage()
	}
	if d, err := time.ParseDuration(st.Annotations[criconfig.AnnotationDelay]); err == nil {
		out.Delay = d
	}
	switch st.State {
	case cri.ContainerState_CONTAINER_CREATED:
		out.State = lifecycle.Created
	case cri.ContainerState_CONTAINER_RUNNING:
		out.State = lifecycle.Running
	case cri.ContainerState_CONTAINER_EXITED:
		out.State = lifecycle.Exited
		if out.Times.Finished.IsZero() {
			out.Times.Finished = out.Times.Created
		}
		out.Message = pr.w.configs.ReadTerminationMessage(pr.w.desiredPod(), st)
	default:
		out.State = lifecycle.Unknown
	}
	pr.w.mu.Lock()
	defer pr.w.mu.Unlock()
	if pr.times.recordTimes(&out, start, pr.w.cfg.currentTime()); out.State == lifecycle.Exited {
		pr.ended[listed.Id] = out
	}
	return out, nil
}

func unixNanoTime(nano int64) time.Time {
	if nano <= 0 {
		return time.Time{}
	}
	return time.Unix(0, nano)
}
