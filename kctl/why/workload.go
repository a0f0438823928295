package why

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
)

// workload contains the properties that Deployments, ReplicaSets, StatefulSets, DaemonSets and Jobs
// have in common.
type workload struct {
	metav1.Object
	kind  string
	owner []metav1.Object // controllers of the pods: the workload itself, or the ReplicaSets of a Deployment
	want  int32
	ready int32
}

func (l *workload) workloadName() string { return objectName(l.kind, l) }

// explainDeployment returns the Findings about a Deployment that is being deleted or paused, has an
// unobserved change, or cannot create pods. Findings also result from a rollout that makes no
// progress, and from missing ready or updated replicas. The Findings about its pods follow. It
// returns nil if there is no such problem.
func (w workloadExplainer) explainDeployment(d *appsv1.Deployment) []Finding {
	l := &workload{Object: d, kind: "deployment", want: ptr.Deref(d.Spec.Replicas, 1), ready: d.Status.ReadyReplicas}
	for i := range w.world.ReplicaSets {
		if rs := &w.world.ReplicaSets[i]; metav1.IsControlledBy(rs, d) {
			l.owner = append(l.owner, rs)
		}
	}
	var first []Finding
	if f := w.explainUnobserved(l, d.Generation, d.Status.ObservedGeneration); f != nil {
		first = append(first, *f)
	}
	if d.Spec.Paused {
		first = append(first, Finding{Object: l.workloadName(),
			What: "is paused: changes of its template are not rolled out",
			Mend: []string{kctlCommand(d, "rollout resume deployment/%s", d.Name)}})
	}
	for _, c := range d.Status.Conditions {
		switch {
		case c.Type == appsv1.DeploymentReplicaFailure && c.Status == corev1.ConditionTrue:
			first = append(first, w.explainRefusedPods(l, c.Message, timeOrNil(c.LastTransitionTime)))
		case c.Type == appsv1.DeploymentProgressing && c.Status == corev1.ConditionFalse:
			first = append(first, Finding{Object: l.workloadName(),
				What:  "does not come on with its rollout (" + c.Reason + ")",
				Since: timeOrNil(c.LastTransitionTime), Because: singleLine(c.Message),
				Mend: []string{kctlCommand(d, "rollout undo deployment/%s   # back to the revision before", d.Name)}})
		}
	}
	updated := d.Status.UpdatedReplicas
	text := fmt.Sprintf("%d of %d ready, %d of the newest template", d.Status.ReadyReplicas, l.want, updated)
	return w.completeFindings(l, first, text, l.ready < l.want || updated < l.want)
}

// explainReplicaSet returns the Findings about a ReplicaSet that is being deleted, has an
// unobserved change, cannot create pods, or has too few ready replicas. The Findings about its pods
// follow. It returns nil if there is no such problem.
func (w workloadExplainer) explainReplicaSet(rs *appsv1.ReplicaSet) []Finding {
	l := &workload{Object: rs, kind: "replicaset", owner: []metav1.Object{rs}, want: ptr.Deref(rs.Spec.Replicas, 1),
		ready: rs.Status.ReadyReplicas}
	var first []Finding
	if f := w.explainUnobserved(l, rs.Generation, rs.Status.ObservedGeneration); f != nil {
		first = append(first, *f)
	}
	for _, c := range rs.Status.Conditions {
		if c.Type == appsv1.ReplicaSetReplicaFailure && c.Status == corev1.ConditionTrue {
			first = append(first, w.explainRefusedPods(l, c.Message, timeOrNil(c.LastTransitionTime)))
		}
	}
	return w.completeFindings(l, first, fmt.Sprintf("%d of %d ready", l.ready, l.want), l.ready < l.want)
}

// explainStatefulSet returns the Findings about a StatefulSet that is being deleted, has an
// unobserved change, cannot create pods, or has too few ready replicas. Findings also result from
// pods with an old template: because of OnDelete, a partition, or a blocked rollout. The Findings
// about its pods follow. It returns nil if there is no such problem.
func (w workloadExplainer) explainStatefulSet(s *appsv1.StatefulSet) []Finding {
	l := &workload{Object: s, kind: "statefulset", owner: []metav1.Object{s}, want: ptr.Deref(s.Spec.Replicas, 1),
		ready: s.Status.ReadyReplicas}
	var first []Finding
	if f := w.explainUnobserved(l, s.Generation, s.Status.ObservedGeneration); f != nil {
		first = append(first, *f)
	}
	if f := w.explainFailedCreate(l); f != nil {
		first = append(first, *f)
	}
	old := s.Status.UpdateRevision != "" && s.Status.UpdateRevision != s.Status.CurrentRevision &&
		s.Status.UpdatedReplicas < l.want
	if u := s.Spec.UpdateStrategy; old && u.Type == appsv1.OnDeleteStatefulSetStrategyType {
		first = append(first, Finding{Object: l.workloadName(),
			What:    fmt.Sprintf("%d of %d pods have the old template", l.want-s.Status.UpdatedReplicas, l.want),
			Because: "its update strategy is OnDelete: a pod gets the new template when somebody deletes it",
			Mend:    []string{kctlCommand(s, "delete pod %s-%d   # and so on", s.Name, l.want-1)}})
	} else if r := u.RollingUpdate; old && r != nil && r.Partition != nil && *r.Partition > 0 {
		first = append(first, Finding{Object: l.workloadName(),
			What:    fmt.Sprintf("%d of %d pods have the old template", l.want-s.Status.UpdatedReplicas, l.want),
			Because: fmt.Sprintf("its partition is %d: pods of lower numbers keep the old template", *r.Partition),
			Mend: []string{kctlCommand(s,
				`patch statefulset %s --type=merge -p '{"spec":{"updateStrategy":{"rollingUpdate":{"partition":0}}}}'`,
				s.Name)}})
	}
	first = append(first, w.explainStuckPods(s, w.podsOf(l))...)
	out := w.completeFindings(l, first, fmt.Sprintf("%d of %d ready", l.ready, l.want), l.ready < l.want)
	if l.ready < l.want && s.Spec.PodManagementPolicy != appsv1.ParallelPodManagement && len(out) > 0 &&
		len(out[0].Details) < maxDetails {
		out[0].Details = append(out[0].Details,
			"its pods come one after the other: a pod waits until those before it are Ready")
	}
	return out
}

// explainStuckPods returns a Finding for each pod in pods that blocks the rollout of StatefulSet s:
// it has an old revision and is not Ready. The StatefulSet controller waits for such a pod and does
// not replace it, even if the newest template corrects it. It returns nil if s is nil, or if s does
// not replace its pods in order.
func (w workloadExplainer) explainStuckPods(s *appsv1.StatefulSet, pods []corev1.Pod) (out []Finding) {
	if s == nil || s.Status.UpdateRevision == "" || s.Spec.PodManagementPolicy == appsv1.ParallelPodManagement ||
		s.Spec.UpdateStrategy.Type == appsv1.OnDeleteStatefulSetStrategyType {
		return nil
	}
	first := 0
	if r := s.Spec.UpdateStrategy.RollingUpdate; r != nil && r.Partition != nil {
		first = int(*r.Partition)
	}
	if s.Spec.Ordinals != nil {
		first = max(first, int(s.Spec.Ordinals.Start))
	}
	slices.SortFunc(pods, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	for i := range pods {
		p := &pods[i]
		revision := p.Labels[appsv1.StatefulSetRevisionLabel]
		ordinal, err := strconv.Atoi(p.Name[strings.LastIndexByte(p.Name, '-')+1:])
		if err != nil || ordinal < first || revision == "" || revision == s.Status.UpdateRevision ||
			p.DeletionTimestamp != nil {
			continue
		}
		if api.IsPodReady(p) {
			continue
		}
		f := Finding{Object: objectName("pod", p),
			What: "keeps an old template and blocks the rollout of statefulset " + s.Name,
			Because: fmt.Sprintf("it is of revision %s and not Ready, and the rollout to revision %s replaces pods in "+
				"order, waiting until each is Ready (podManagementPolicy OrderedReady)",
				revision, s.Status.UpdateRevision),
			Mend: []string{kctlCommand(p, "delete pod %s   # its replacement gets the newest template", p.Name)}}
		if c := api.PodCondition(p, corev1.PodReady); c != nil {
			f.Since = timeOrNil(c.LastTransitionTime)
		}
		if out = append(out, f); len(out) == maxDetails {
			break
		}
	}
	return out
}

// explainDaemonSet returns the Findings about a DaemonSet that is being deleted, has an unobserved
// change, cannot create pods, or matches no node. Findings also result from too few ready pods, and
// from pods with an old template if the update strategy is OnDelete. The Findings about its pods
// follow. It returns nil if there is no such problem.
func (w workloadExplainer) explainDaemonSet(d *appsv1.DaemonSet) []Finding {
	s := d.Status
	l := &workload{Object: d, kind: "daemonset", owner: []metav1.Object{d}, want: s.DesiredNumberScheduled,
		ready: s.NumberReady}
	var first []Finding
	if f := w.explainUnobserved(l, d.Generation, s.ObservedGeneration); f != nil {
		first = append(first, *f)
	}
	if f := w.explainFailedCreate(l); f != nil {
		first = append(first, *f)
	}
	if l.want == 0 && s.ObservedGeneration > 0 && len(first) == 0 {
		first = append(first, Finding{Object: l.workloadName(), What: "runs on no node",
			Because: "no node fits its selector, affinity and tolerations",
			Mend:    []string{"kctl get nodes --show-labels", kctlCommand(d, "edit daemonset %s", d.Name)}})
	}
	if s.UpdatedNumberScheduled < l.want && d.Spec.UpdateStrategy.Type == appsv1.OnDeleteDaemonSetStrategyType {
		first = append(first, Finding{Object: l.workloadName(),
			What:    fmt.Sprintf("%d of %d pods have the old template", l.want-s.UpdatedNumberScheduled, l.want),
			Because: "its update strategy is OnDelete: a pod gets the new template when somebody deletes it"})
	}
	return w.completeFindings(l, first, fmt.Sprintf("ready on %d of %d nodes", l.ready, l.want), l.ready < l.want)
}

// explainJob returns the Findings about a Job that has failed, is suspended, is being deleted,
// cannot create pods, or has failed or unready pods. The Findings about its pods follow, except for
// a suspended Job. It returns nil for a complete Job, or if there is no such problem.
func (w workloadExplainer) explainJob(j *batchv1.Job) []Finding {
	l := &workload{Object: j, kind: "job", owner: []metav1.Object{j}}
	for _, c := range j.Status.Conditions {
		if c.Status != corev1.ConditionTrue {
			continue
		}
		switch c.Type {
		case batchv1.JobComplete:
			return nil
		case batchv1.JobFailed, batchv1.JobFailureTarget:
			f := Finding{Object: l.workloadName(), What: "has failed for good (" + c.Reason + ")",
				Since: timeOrNil(c.LastTransitionTime), Because: singleLine(c.Message),
				Mend: []string{kctlCommand(j, "logs job/%s", j.Name),
					kctlCommand(j, "replace --force -f FILE   # runs it again")}}
			return w.completeFindings(l, []Finding{f}, "", false)
		case batchv1.JobSuspended:
			return []Finding{{Object: l.workloadName(), What: "is suspended", Since: timeOrNil(c.LastTransitionTime),
				Because: singleLine(c.Message),
				Mend:    []string{kctlCommand(j, `patch job %s --type=merge -p '{"spec":{"suspend":false}}'`, j.Name)}}}
		}
	}
	var first []Finding
	if f := w.explainFailedCreate(l); f != nil {
		first = append(first, *f)
	}
	limit := ptr.Deref(j.Spec.BackoffLimit, int32(6))
	ready := ptr.Deref(j.Status.Ready, int32(0))
	text := fmt.Sprintf("%d active (%d ready), %d succeeded, %d failed of the %d that it bears", j.Status.Active, ready,
		j.Status.Succeeded, j.Status.Failed, limit)
	return w.completeFindings(l, first, text, j.Status.Failed > 0 || j.Status.Active > ready)
}

// explainUnobserved returns a Finding if observed, the generation that the controller of l has
// processed, is less than generation. It returns nil otherwise.
func (w workloadExplainer) explainUnobserved(l *workload, generation, observed int64) *Finding {
	if observed >= generation {
		return nil
	}
	return &Finding{Object: l.workloadName(), What: "its last change is not taken up yet",
		Because: fmt.Sprintf("its controller has seen generation %d, and the object is at %d", observed, generation),
		Mend:    []string{"kctl cluster status"}}
}

// explainFailedCreate returns a Finding if a recent event reports that a pod of l could not be
// created. It returns nil otherwise. It is used for kinds without a status condition about failed
// creation.
func (w workloadExplainer) explainFailedCreate(l *workload) *Finding {
	e := w.world.newestEvent(l.GetUID(), "FailedCreate")
	if e == nil || w.world.Now.Sub(lastSeen(e)) > maxEventAge {
		return nil
	}
	when := metav1.NewTime(lastSeen(e))
	f := w.explainRefusedPods(l, e.Message, &when)
	return &f
}

// explainRefusedPods returns the Finding for a workload with pods that the API server refuses to
// create. message is the error of the API server; it determines the repair commands. since is the
// time at which the error was reported.
func (w workloadExplainer) explainRefusedPods(l *workload, message string, since *metav1.Time) Finding {
	message = singleLine(message)
	f := Finding{Object: l.workloadName(), What: "cannot make its pods", Since: since, Because: message,
		Mend: []string{kctlCommand(l, "describe %s %s", l.kind, l.GetName())}}
	switch {
	case strings.Contains(message, "exceeded quota: "):
		_, quota, _ := strings.Cut(message, "exceeded quota: ")
		quota, _, _ = strings.Cut(quota, ",")
		f.What = "cannot make its pods: quota " + quota + " is used up"
		f.Mend = []string{kctlCommand(l, "edit resourcequota %s   # or ask for less, or remove what is not needed",
			quota)}
	case strings.Contains(message, "failed quota: "):
		_, quota, _ := strings.Cut(message, "failed quota: ")
		quota, _, _ = strings.Cut(quota, ":")
		f.What = "cannot make its pods: quota " + quota + " wants requests or limits that they do not name"
		f.Mend = []string{kctlCommand(l,
			"set resources %s/%s --requests=cpu=100m,memory=64Mi --limits=cpu=1,memory=256Mi", l.kind, l.GetName())}
	case strings.Contains(message, "violates PodSecurity"):
		f.What = "cannot make its pods: the namespace's Pod Security level forbids them"
		f.Mend = []string{kctlCommand(l,
			"edit %s %s   # or kctl label namespace %s pod-security.kubernetes.io/enforce=LEVEL --overwrite",
			l.kind, l.GetName(), l.GetNamespace())}
	case strings.Contains(message, "serviceaccount") && strings.Contains(message, "not found"):
		f.Mend = []string{kctlCommand(l, "create serviceaccount NAME")}
	}
	return f
}

// completeFindings returns found, the first Findings about workload l, followed by the Findings
// about its unhealthy pods. If l is being deleted, the Finding about the deletion comes first.
// behind means that l has too few replicas. text, which describes them, is then added to the
// details of the first Finding, or as a Finding if there is no other. completeFindings returns nil
// if found is empty, l is not being deleted, and behind is false.
func (w workloadExplainer) completeFindings(l *workload, found []Finding, text string, behind bool) []Finding {
	if f := explainDeletion(l, l.kind); f != nil {
		found = append([]Finding{*f}, found...)
	}
	if behind && len(found) == 0 {
		found = append(found, Finding{Object: l.workloadName(), What: "is not as it was asked for", Because: text})
	} else if behind {
		found[0].Details = append(found[0].Details, text)
	}
	if !behind && len(found) == 0 {
		return nil
	}
	return append(found, w.explainUnhealthyPods(w.podsOf(l), &found[0])...)
}

// podsOf returns the pods that the workload or one of its ReplicaSets controls.
func (w workloadExplainer) podsOf(l *workload) []corev1.Pod {
	var pods []corev1.Pod
	for i := range w.world.Pods {
		p := &w.world.Pods[i]
		if slices.ContainsFunc(l.owner, func(o metav1.Object) bool { return metav1.IsControlledBy(p, o) }) {
			pods = append(pods, *p)
		}
	}
	return pods
}

// explainUnhealthyPods returns the Findings about unhealthy pods, the newest pod first, and at most
// maxDetails Findings. Pods with the same problem have one Finding. The number of omitted Findings
// is added to the details of summary.
func (w workloadExplainer) explainUnhealthyPods(pods []corev1.Pod, summary *Finding) []Finding {
	slices.SortFunc(pods, func(a, b corev1.Pod) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	var told []Finding
	others, known := 0, map[string]bool{}
	for i := range pods {
		for _, f := range w.world.explainPod(&pods[i]) {
			same := strings.ReplaceAll(f.What+"\n"+f.Because, pods[i].Name, "")
			if known[same] || len(told) == maxDetails {
				others++
				continue
			}
			known[same] = true
			told = append(told, f)
		}
	}
	if others > 0 {
		summary.Details = append(summary.Details,
			"the trouble of "+countNoun(others, "more pod")+" is the same as below")
	}
	return told
}
