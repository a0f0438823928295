package why

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
)

// explainPod returns the Findings about a pod by the first state that applies. The states are:
// being deleted, failed, not scheduled, node lost, container errors, not started, not Ready, and
// errors of ephemeral containers. It returns nil for a healthy or succeeded pod.
func (w *World) explainPod(p *corev1.Pod) []Finding {
	switch {
	case p.DeletionTimestamp != nil:
		return []Finding{w.explainTerminatingPod(p)}
	case p.Status.Phase == corev1.PodSucceeded:
		return nil
	case p.Status.Phase == corev1.PodFailed:
		return []Finding{w.explainFailed(p)}
	case p.Spec.NodeName == "":
		return []Finding{w.placement().explainUnscheduled(p)}
	}
	if f := w.explainLostNode(p); f != nil {
		return []Finding{*f}
	}
	if all := w.explainContainers(p); len(all) > 0 {
		return all
	}
	if f := w.explainStarting(p); f != nil {
		return []Finding{*f}
	}
	if f := w.explainUnready(p); f != nil {
		return []Finding{*f}
	}
	return w.explainEphemeral(p)
}

// healthyPodText returns the state of a pod without Findings: its phase, and since when it is
// Ready.
func (w *World) healthyPodText(p *corev1.Pod) string {
	if p.Status.Phase == corev1.PodSucceeded {
		return "it has done its work (Succeeded)"
	}
	if c := api.PodCondition(p, corev1.PodReady); api.IsPodReady(p) {
		return string(p.Status.Phase) + " and Ready since " + w.ageText(c.LastTransitionTime)
	}
	return string(p.Status.Phase)
}

// explainFailed returns the Finding for a pod in phase Failed: its reason, its failed containers,
// and whether a controller replaces it.
func (w *World) explainFailed(p *corev1.Pod) Finding {
	f := Finding{Object: objectName("pod", p), What: "has failed for good", Because: singleLine(p.Status.Message)}
	if c := api.PodCondition(p, corev1.PodReady); c != nil {
		f.Since = timeOrNil(c.LastTransitionTime)
	}
	reason := p.Status.Reason
	again := kctlCommand(p, "delete pod %s   # and create it again: no controller does so for a pod without an owner",
		p.Name)
	owner := templateOwner(p)
	switch {
	case strings.HasPrefix(owner, "job/"): // the Job replaces the pod, or has itself failed
		again = kctlCommand(p, "describe %s", owner)
	case owner != "":
		f.Details = append(f.Details, owner+" replaces it")
		again = kctlCommand(p, "why %s", owner)
	}
	switch {
	case strings.HasPrefix(reason, "OutOf"):
		r := strings.TrimPrefix(reason, "OutOf")
		f.What = fmt.Sprintf("was refused by node %s, which has too little %s (%s)", p.Spec.NodeName, r, reason)
	case slices.Contains([]string{"NodeAffinity", "TaintToleration", "NodePorts", "PodSecurity",
		"UnexpectedAdmissionError"}, reason):
		f.What = fmt.Sprintf("was refused by node %s (%s)", p.Spec.NodeName, reason)
	case reason == "Evicted":
		f.What = "was evicted by node " + p.Spec.NodeName
		if len(allStatuses(p)) == 0 && strings.Contains(p.Status.Message, "The node had condition") {
			f.What = "was refused by node " + p.Spec.NodeName + ", which is short of something (Evicted)"
		}
		if strings.Contains(p.Status.Message, "The node ") { // a limit of the node
			f.Mend = append(f.Mend, "kctl why node/"+p.Spec.NodeName)
		}
	case reason == "DeadlineExceeded":
		f.What = "ran longer than its activeDeadlineSeconds"
	case reason != "":
		f.What += " (" + reason + ")"
	}
	for _, s := range allStatuses(p) {
		if t := s.State.Terminated; t != nil && t.ExitCode != 0 {
			f.Details = append(f.Details, fmt.Sprintf("container %s %s", s.Name, w.exitText(p, s.Name, t)))
			f.Mend = append(f.Mend, kctlCommand(p, "logs %s -c %s", p.Name, s.Name))
		}
	}
	f.Mend = append(f.Mend, again)
	return f
}

// explainTerminatingPod returns the Finding for a pod that is being deleted, with the reason why it
// still exists. Reasons are finalizers, a missing or unreachable node, the grace period, and
// incomplete cleanup on the node.
func (w *World) explainTerminatingPod(p *corev1.Pod) Finding {
	f := Finding{Object: objectName("pod", p), What: "is being deleted", Since: timeOrNil(*p.DeletionTimestamp)}
	grace := ptr.Deref(p.DeletionGracePeriodSeconds, int64(0))
	end := p.DeletionTimestamp.Time // the deletion timestamp includes the grace period
	f.Since = timeOrNil(metav1.NewTime(end.Add(-time.Duration(grace) * time.Second)))
	node := w.nodeNamed(p.Spec.NodeName)
	force := kctlCommand(p, "delete pod %s --grace-period=0 --force   # only when nothing of it runs any more", p.Name)
	switch {
	case len(p.Finalizers) > 0 && isTerminated(p):
		f.Because = "its containers have ended, and finalizers hold the object: " + finalizerOwners(p.Finalizers)
		f.Mend = []string{unfinalizeCommand(p, "pod")}
	case p.Spec.NodeName != "" && w.hasList(Nodes) && node == nil:
		f.Because = "its node " + p.Spec.NodeName + " is gone from the cluster, so nobody says that it has ended"
		f.Mend = []string{force}
	case node != nil && !api.IsNodeReady(node):
		f.Because = "its node " + node.Name + " is not Ready, so nobody says that it has ended"
		f.Mend = []string{"kctl why node/" + node.Name, force}
	case w.Now.Before(end):
		f.Because = fmt.Sprintf("it has %s of its grace period (%d s) left to end by itself",
			shortDuration(end.Sub(w.Now)), grace)
	case len(p.Status.ContainerStatuses) > 0 && isTerminated(p):
		w.explainIncompleteCleanup(p, &f)
	default:
		f.Because = fmt.Sprintf("its grace period (%d s) ended %s ago, and its containers have not", grace,
			shortDuration(w.Now.Sub(end)))
		f.Mend = []string{kctlCommand(p, "describe pod %s", p.Name), "kctl why node/" + p.Spec.NodeName}
	}
	if len(p.Finalizers) > 0 && !isTerminated(p) {
		f.Details = append(f.Details, "after that its finalizers hold it: "+finalizerOwners(p.Finalizers))
	}
	return f
}

// explainIncompleteCleanup fills Finding f for a pod that is being deleted and still exists after
// its containers have terminated. The reason is an unmount error, if an event reports it.
func (w *World) explainIncompleteCleanup(p *corev1.Pod, f *Finding) {
	f.Because = "its containers have ended, and its node has not yet taken away what it had"
	f.Mend = []string{kctlCommand(p, "describe pod %s", p.Name), "kctl why node/" + p.Spec.NodeName}
	if e := w.newestEvent(p.UID, "FailedUnMount"); e != nil {
		f.Because = "its containers have ended, and a volume cannot be unmounted: " + singleLine(e.Message)
		f.Details = []string{fmt.Sprintf("last tried %s ago", shortDuration(w.Now.Sub(lastSeen(e))))}
	}
}

func isTerminated(p *corev1.Pod) bool {
	if api.IsPodTerminal(p) || p.Spec.NodeName == "" {
		return true
	}
	return !slices.ContainsFunc(p.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool {
		return s.State.Running != nil
	})
}

func (w *World) nodeNamed(name string) *corev1.Node {
	i := slices.IndexFunc(w.Nodes, func(n corev1.Node) bool { return n.Name == name })
	if i < 0 {
		return nil
	}
	return &w.Nodes[i]
}

// explainLostNode returns a Finding if the node of pod p does not exist or is not Ready. It returns
// nil otherwise, or if nodes could not be read.
func (w *World) explainLostNode(p *corev1.Pod) *Finding {
	if !w.hasList(Nodes) {
		return nil
	}
	n := w.nodeNamed(p.Spec.NodeName)
	f := &Finding{Object: objectName("pod", p), What: "has lost its node"}
	switch {
	case n == nil:
		f.Because = fmt.Sprintf("node %s is not in the cluster: the pod is removed within a minute, or waits for a "+
			"node of that name", p.Spec.NodeName)
		f.Mend = []string{"kctl get nodes"}
	case api.IsNodeReady(n):
		return nil
	default:
		c := api.NodeCondition(n, corev1.NodeReady)
		f.Because = "node " + n.Name + " is not Ready"
		if c != nil {
			f.Since, f.Because = timeOrNil(c.LastTransitionTime), f.Because+": "+singleLine(c.Message)
		}
		f.Mend = []string{"kctl why node/" + n.Name}
	}
	return f
}

// explainInitializing fills Finding f and returns true if a running init container delays the start
// of other containers of pod p. A sidecar that has not started counts as well. Otherwise it returns
// false.
func (w *World) explainInitializing(p *corev1.Pod, f *Finding) bool {
	for _, s := range p.Status.InitContainerStatuses {
		if s.State.Running == nil {
			continue
		}
		i := slices.IndexFunc(p.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == s.Name })
		if i < 0 {
			continue
		}
		c := &p.Spec.InitContainers[i]
		logs := kctlCommand(p, "logs %s -c %s", p.Name, s.Name)
		f.Since = timeOrNil(s.State.Running.StartedAt)
		if c.RestartPolicy == nil || *c.RestartPolicy != corev1.ContainerRestartPolicyAlways {
			f.What = fmt.Sprintf("waits for init container %s, which runs (%d of %d)", s.Name, i+1,
				len(p.Spec.InitContainers))
			f.Because = "the containers after it start when it has ended with exit code 0"
			f.Mend = []string{logs}
			return true
		}
		if s.Started != nil && !*s.Started {
			f.What = fmt.Sprintf("waits for sidecar %s (%d of %d init containers)", s.Name, i+1,
				len(p.Spec.InitContainers))
			f.Because = "the containers after it start when its startup probe has succeeded"
			if e := w.probeEvent(p, s.Name); e != nil {
				f.Because += "; last: " + singleLine(e.Message)
			}
			f.Mend = []string{logs}
			return true
		}
	}
	return false
}

// explainStarting returns a Finding for a scheduled pod in phase Pending. The reason is a running
// init container, a sandbox error, or an attach or mount error. It returns nil for any other phase.
func (w *World) explainStarting(p *corev1.Pod) *Finding {
	if p.Status.Phase != corev1.PodPending {
		return nil
	}
	f := &Finding{Object: objectName("pod", p), What: "has not started its containers",
		Since: timeOrNil(p.CreationTimestamp)}
	if p.Status.StartTime != nil {
		f.Since = p.Status.StartTime
	}
	if init := w.explainInitializing(p, f); init {
		return f
	}
	e := w.claims().attachFailure(p, "")
	if e == nil {
		e = w.newestEvent(p.UID, "FailedMount", "FailedCreatePodSandBox")
	}
	if e != nil {
		switch e.Reason {
		case "FailedCreatePodSandBox":
			f.Because = "its sandbox (network, cgroup) cannot be made: " + singleLine(e.Message)
			f.Mend = []string{"kctl why node/" + p.Spec.NodeName}
		case "FailedAttachVolume":
			f.Because = "a volume is not attached to its node: " + singleLine(e.Message)
			f.Mend = []string{"kctl get volumeattachments   # who has which volume"}
			for _, v := range p.Spec.Volumes {
				if v.PersistentVolumeClaim != nil {
					f.Mend = append(f.Mend, kctlCommand(p, "why persistentvolumeclaim/%s",
						v.PersistentVolumeClaim.ClaimName))
				}
			}
			f.Mend = boundList(f.Mend)
		default:
			f.Because = "a volume cannot be mounted: " + singleLine(e.Message)
			f.Mend = missingObjectCommands(p, e.Message)
		}
		f.Details = []string{fmt.Sprintf("last tried %s ago", shortDuration(w.Now.Sub(lastSeen(e))))}
		return f
	}
	f.Because = "node " + p.Spec.NodeName + " is about it, and has told of no trouble"
	if !w.hasList(Events) {
		f.Because = "node " + p.Spec.NodeName + " is about it"
	}
	f.Mend = []string{kctlCommand(p, "get pod %s -w", p.Name), kctlCommand(p, "trace pod %s", p.Name)}
	return f
}

// explainUnready returns a Finding for a running pod that is not Ready because of a readiness probe
// or a readiness gate. It returns nil otherwise.
func (w *World) explainUnready(p *corev1.Pod) *Finding {
	c := api.PodCondition(p, corev1.PodReady)
	if c != nil && c.Status == corev1.ConditionTrue {
		return nil
	}
	f := &Finding{Object: objectName("pod", p), What: "runs and is not Ready: Services send it nothing"}
	if c != nil {
		f.Since = timeOrNil(c.LastTransitionTime)
	}
	var not []string
	for _, s := range p.Status.ContainerStatuses {
		if s.State.Running == nil || s.Ready {
			continue
		}
		not = append(not, s.Name)
		f.Details = append(f.Details, probeOf(p, s.Name, "readiness"))
	}
	if len(not) == 0 {
		for _, g := range p.Spec.ReadinessGates {
			if c := api.PodCondition(p, g.ConditionType); c == nil || c.Status != corev1.ConditionTrue {
				f.Because = fmt.Sprintf("its readiness gate %q is not True: whoever set the gate sets the condition",
					g.ConditionType)
				f.Mend = []string{kctlCommand(p, "get pod %s -o jsonpath='{.status.conditions}'", p.Name)}
				return f
			}
		}
		return nil
	}
	f.Because = "the readiness probe of " + strings.Join(not, ", ") + " has not succeeded"
	if e := w.probeEvent(p, not[0]); e != nil {
		f.Because = singleLine(e.Message)
	}
	f.Mend = []string{kctlCommand(p, "logs %s -c %s", p.Name, not[0])}
	return f
}

// probeEvent returns the newest event about a failed probe of a container of pod p, or nil.
func (w *World) probeEvent(p *corev1.Pod, container string) *corev1.Event {
	var best *corev1.Event
	for i := range w.Events {
		e := &w.Events[i]
		if e.InvolvedObject.UID == p.UID && e.Reason == "Unhealthy" &&
			strings.Contains(e.InvolvedObject.FieldPath, "{"+container+"}") &&
			(best == nil || lastSeen(best).Before(lastSeen(e))) {
			best = e
		}
	}
	return best
}

// probeOf returns a text about a probe of a container of pod p: its request or command, interval
// and timeout. kind is "liveness" or "readiness". It returns "" if the container does not exist.
func probeOf(p *corev1.Pod, container, kind string) string {
	i := slices.IndexFunc(p.Spec.Containers, func(c corev1.Container) bool { return c.Name == container })
	if i < 0 {
		return ""
	}
	probe := p.Spec.Containers[i].ReadinessProbe
	if kind == "liveness" {
		probe = p.Spec.Containers[i].LivenessProbe
	}
	text := "container " + container + " has no " + kind + " probe"
	if probe == nil {
		return text
	}
	what := "a command"
	switch {
	case probe.HTTPGet != nil:
		what = fmt.Sprintf("GET %s on port %s", probe.HTTPGet.Path, probe.HTTPGet.Port.String())
	case probe.TCPSocket != nil:
		what = "TCP port " + probe.TCPSocket.Port.String()
	case probe.GRPC != nil:
		what = fmt.Sprintf("gRPC port %d", probe.GRPC.Port)
	case probe.Exec != nil:
		what = strings.Join(probe.Exec.Command, " ")
	}
	return fmt.Sprintf("container %s: %s probe asks %s every %d s, within %d s", container, kind, what,
		max(probe.PeriodSeconds, 1), max(probe.TimeoutSeconds, 1))
}
