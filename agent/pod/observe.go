package pod

import (
	"cmp"
	"context"
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// observe queries the runtime for the pod's sandboxes and containers. ok is false if the runtime
// returned an error.
func (w *worker) observe(ctx context.Context) (o Observed, ok bool) {
	sel := map[string]string{agent.LabelPodUID: string(w.pod().UID)}
	sbs, err := w.cfg.Runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{LabelSelector: sel}})
	if err != nil {
		w.blind(ctx, "listing sandboxes", err)
		return o, false
	}
	for _, sb := range sbs.Items {
		s := Sandbox{ID: sb.Id, Attempt: sb.GetMetadata().GetAttempt(), Ready: sb.State == cri.PodSandboxState_SANDBOX_READY, Created: time.Unix(0, sb.CreatedAt)}
		if s.Ready {
			st, err := w.cfg.Runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: sb.Id})
			if err != nil {
				w.blind(ctx, "asking for the status of sandbox "+sb.Id, err)
				return o, false
			}
			s.IPs = sandboxIPs(st.GetStatus())
			s.HostNet = st.GetStatus().GetLinux().GetNamespaces().GetOptions().GetNetwork() == cri.NamespaceMode_NODE || w.pod().Spec.HostNetwork
			s.Ready = st.GetStatus().GetState() == cri.PodSandboxState_SANDBOX_READY
		}
		w.mu.Lock()
		if w.clocks.born[sb.Id].IsZero() {
			w.clocks.born[sb.Id] = anchor(s.Created, time.Time{}, w.cfg.now())
		}
		s.Born = w.clocks.born[sb.Id]
		w.mu.Unlock()
		o.Sandboxes = append(o.Sandboxes, s)
	}
	slices.SortFunc(o.Sandboxes, func(a, b Sandbox) int {
		return cmp.Or(cmp.Compare(b.Attempt, a.Attempt), b.Created.Compare(a.Created))
	})
	cs, err := w.cfg.Runtime.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{LabelSelector: sel}})
	if err != nil {
		w.blind(ctx, "listing containers", err)
		return o, false
	}
	for _, c := range cs.Containers {
		seen, err := w.container(ctx, c)
		if err != nil {
			w.blind(ctx, "asking for the status of container "+c.Id, err)
			return o, false
		}
		o.Containers = append(o.Containers, seen)
	}
	slices.SortFunc(o.Containers, func(a, b Container) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(b.Attempt, a.Attempt), b.Created.Compare(a.Created))
	})
	return o, true
}

func (w *worker) blind(ctx context.Context, doing string, err error) {
	if ctx.Err() == nil {
		w.log.Warn("cannot observe the pod", "doing", doing, "err", err)
	}
}

// container completes a listed container with its status. The status of an ended container never
// changes and is cached.
func (w *worker) container(ctx context.Context, c *cri.Container) (Container, error) {
	if c.State == cri.ContainerState_CONTAINER_EXITED {
		w.mu.Lock()
		seen, ok := w.ended[c.Id]
		w.mu.Unlock()
		if ok {
			return seen, nil
		}
	}
	asked := w.cfg.now()
	res, err := w.cfg.Runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.Id})
	if err != nil {
		return Container{}, err
	}
	st := res.Status
	out := Container{ID: c.Id, Sandbox: c.PodSandboxId, Name: st.GetMetadata().GetName(), Attempt: st.GetMetadata().GetAttempt(), Created: stamp(st.CreatedAt), Started: stamp(st.StartedAt),
		Finished: stamp(st.FinishedAt), ExitCode: st.ExitCode, Reason: st.Reason, Message: st.Message, ImageID: st.ImageRef, Hash: st.Annotations[annHash], Delay: noDelay,
		Limits: st.GetResources().GetLinux()}
	if out.Image = st.GetImage().GetUserSpecifiedImage(); out.Image == "" {
		out.Image = st.GetImage().GetImage()
	}
	if d, err := time.ParseDuration(st.Annotations[annDelay]); err == nil {
		out.Delay = d
	}
	switch st.State {
	case cri.ContainerState_CONTAINER_CREATED:
		out.State = Created
	case cri.ContainerState_CONTAINER_RUNNING:
		out.State = Running
	case cri.ContainerState_CONTAINER_EXITED:
		out.State = Exited
		if out.Finished.IsZero() {
			out.Finished = out.Created
		}
		out.Message = w.terminationMessage(st)
	default:
		out.State = Unknown
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.clocks.note(&out, asked, w.cfg.now()); out.State == Exited {
		w.ended[c.Id] = out
	}
	return out, nil
}

func stamp(nano int64) time.Time {
	if nano <= 0 {
		return time.Time{}
	}
	return time.Unix(0, nano)
}
