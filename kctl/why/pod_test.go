package why

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// F126
func TestPendingPods(t *testing.T) {
	tainted := func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: "dedicated", Value: "gpu", Effect: corev1.TaintEffectNoSchedule}}
	}
	cordoned := func(n *corev1.Node) { n.Spec.Unschedulable = true }
	full := pod("full", on("w1"), asks("cpu", "1700m"))
	volume := func(p *corev1.Pod) {
		p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "web-dtaa"}}}}
	}
	ownVolume := func(p *corev1.Pod) {
		p.Spec.Volumes = []corev1.Volume{{Name: "data",
			VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}}}
	}
	claim := corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "web-data", Namespace: "default"}}
	const noRoom = "0/3 nodes are available: 1 node(s) had untolerated taint {dedicated: gpu}, 1 node(s) were " +
		"unschedulable, 2 Insufficient cpu. " +
		"preemption: 0/3 nodes are available: 1 Preemption is not helpful for scheduling, 2 No preemption victims " +
		"found for incoming pod."
	transcript(t, "pending", []subject{
		{"the nearest node has too little cpu", World{Nodes: []corev1.Node{node("w1"), node("w2", tainted),
			node("w3", cordoned)},
			Placed: []corev1.Pod{*full, *pod("more", on("w2"), asks("cpu", "1900m")),
				*pod("most", on("w3"), asks("cpu", "1900m"))}},
			pod("a", asks("cpu", "500m"), unfit(noRoom))},
		{"one taint", World{Nodes: []corev1.Node{node("w2", tainted)}},
			pod("a", unfit("0/1 nodes are available: 1 node(s) had untolerated taint {dedicated: gpu}."))},
		{"larger than every node, all pods not read", World{Nodes: []corev1.Node{node("w1")}, Unread: []string{Placed}},
			pod("a", alone, asks("cpu", "8"),
				unfit("0/1 nodes are available: 1 Insufficient cpu. preemption: not eligible due to "+
					"preemptionPolicy=Never."))},
		{"a selector", World{Nodes: []corev1.Node{node("w1", func(n *corev1.Node) { n.Labels["disk"] = "hdd" })}},
			pod("a", unfit("0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."),
				func(p *corev1.Pod) {
					p.Spec.NodeSelector = map[string]string{"disk": "ssd"}
				})},
		{"resources of the pod, for which an agent is too old", World{Nodes: []corev1.Node{node("w1")}},
			pod("a", podLevel("cpu", "500m"), unfit("0/1 nodes are available: 1 node declared features check failed - "+
				"unsatisfied requirements: PodLevelResources."))},
		{"too large resources of the pod", World{Nodes: []corev1.Node{node("w1", func(n *corev1.Node) {
			n.Status.DeclaredFeatures = []string{"PodLevelResources"}
		})}}, pod("a", podLevel("cpu", "8"), asks("cpu", "1"),
			unfit("0/1 nodes are available: 1 Insufficient cpu."))},
		{"gates", World{}, pod("a", func(p *corev1.Pod) {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/quota"},
				{Name: "example.com/licence"}}
		})},
		{"a claim that is not there", World{Claims: []corev1.PersistentVolumeClaim{claim}},
			pod("a", volume, unfit(`0/1 nodes are available: persistentvolumeclaim "web-dtaa" not found.`))},
		{"a claim that is still to be made", World{}, pod("web", ownVolume, unfit(
			`0/1 nodes are available: waiting for ephemeral volume controller to create the `+
				`persistentvolumeclaim "web-data".`))},
		{"a claim that cannot be made",
			World{Events: []corev1.Event{{InvolvedObject: corev1.ObjectReference{UID: pod("web").UID},
				Reason:        "FailedBinding",
				LastTimestamp: ago(time.Second), Message: "ephemeral volume of claim web-data: exceeded quota: all"}}},
			pod("web", ownVolume)},
		{"a claim of somebody else's", World{Claims: []corev1.PersistentVolumeClaim{claim}}, pod("web", ownVolume)},
		{"claims not read", World{Unread: []string{Claims, Nodes}},
			pod("a", volume, unfit(`0/1 nodes are available: persistentvolumeclaim "web-dtaa" not found.`))},
		{"others give way", World{}, pod("a", unfit(noRoom), func(p *corev1.Pod) {
			p.Status.NominatedNodeName = "w1"
		})},
		{"no node at all", World{}, pod("a", unfit("no nodes available to schedule pods"))},
		{"another scheduler", World{}, pod("a", func(p *corev1.Pod) { p.Spec.SchedulerName = "batch" })},
		{"a scheduler that nobody serves",
			World{Group: GroupObjects{Schedulers: []string{"default-scheduler", "packed"}}},
			pod("a", func(p *corev1.Pod) { p.Spec.SchedulerName = "batch" })},
		{"no profile is the default one", World{Group: GroupObjects{Schedulers: []string{"packed"}}}, pod("a")},
		{"a profile that has not come to it yet",
			World{Group: GroupObjects{Schedulers: []string{"default-scheduler", "packed"}}},
			pod("a", func(p *corev1.Pod) { p.Spec.SchedulerName = "packed" })},
		{"refused by its node", World{}, pod("a", on("w1"), func(p *corev1.Pod) {
			p.Status.Phase, p.Status.Reason = corev1.PodFailed, "OutOfcpu"
			p.Status.Message = "Pod was rejected: Node didn't have enough resource: cpu, requested: 500, used: " +
				"1900, capacity: 2000"
		})},
	})
}

func waits(reason, message string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", Image: "registry.local/web:1",
			State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}}}
	}
}

func crashed(end corev1.ContainerStateTerminated) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		waits("CrashLoopBackOff", "back-off 40s restarting failed container=main pod=a_default(a)")(p)
		p.Status.Phase = corev1.PodRunning
		end.StartedAt, end.FinishedAt = ago(90*time.Second), ago(30*time.Second)
		s := &p.Status.ContainerStatuses[0]
		s.RestartCount, s.LastTerminationState.Terminated = 4, &end
	}
}

func deleted(end, grace time.Duration, finalizers ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		when, seconds := metav1.NewTime(now.Add(end)), int64(grace/time.Second)
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds, p.Finalizers = &when, &seconds, finalizers
	}
}

var podsThatDoNotRunNodes = []corev1.Node{node("w1")}

func podsThatDoNotRunW(events ...corev1.Event) World {
	return World{Nodes: podsThatDoNotRunNodes, Events: events}
}

func podsThatDoNotRunProbes(p *corev1.Pod) {
	probe := &corev1.Probe{PeriodSeconds: 5, TimeoutSeconds: 1}
	probe.HTTPGet = &corev1.HTTPGetAction{Path: "/health", Port: intstr.FromInt32(8080)}
	p.Spec.Containers[0].LivenessProbe, p.Spec.Containers[0].ReadinessProbe = probe, probe
}

func podsThatDoNotRunRuns(p *corev1.Pod) {
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main",
		State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
}

var podsThatDoNotRunDead = node("w1", func(n *corev1.Node) {
	n.Status.Conditions[0].Status, n.Status.Conditions[0].Message = corev1.ConditionUnknown,
		"Kubelet stopped posting node status."
})

func podsThatDoNotRunOver(p *corev1.Pod) {
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main",
		State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137}}}}
}

var podsThatDoNotRunA = pod("a")

// podsThatDoNotRunCases are the cases of TestPodsThatDoNotRun.
var podsThatDoNotRunCases = []subject{
	{"an image that is not there", podsThatDoNotRunW(said(podsThatDoNotRunA, "Pulling",
		`Pulling image "registry.local/web:1"`, 20*time.Second)),
		pod("a", on("w1"), waits("ImagePullBackOff",
			`Back-off pulling image "registry.local/web:1": ErrImagePull: image registry.local/web:1: `+
				`registry.local: `+
				`manifest not found`))},
	{"an image that needs a password", podsThatDoNotRunW(), pod("a", on("w1"),
		waits("ErrImagePull", "image registry.local/web:1: 401 unauthorized"))},
	{"a crash loop", podsThatDoNotRunW(), pod("a", on("w1"),
		crashed(corev1.ContainerStateTerminated{ExitCode: 1, Reason: "Error", Message: "panic: no\nroute"}))},
	{"a message that would steer the terminal", podsThatDoNotRunW(),
		pod("a", on("w1"), crashed(corev1.ContainerStateTerminated{ExitCode: 1, Message: "\x1b[2Jgone\u009b"}))},
	{"a signal", podsThatDoNotRunW(), pod("a", on("w1"),
		crashed(corev1.ContainerStateTerminated{ExitCode: 139, Reason: "Error"}))},
	{"out of memory", podsThatDoNotRunW(), pod("a", on("w1"),
		crashed(corev1.ContainerStateTerminated{ExitCode: 137, Reason: "OOMKilled"}), func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = quantities("memory", "64Mi")
		})},
	{"a liveness probe", podsThatDoNotRunW(said(podsThatDoNotRunA, "Unhealthy",
		"Liveness probe failed: HTTP probe failed with statuscode: 500",
		time.Minute, "main")),
		pod("a", on("w1"), podsThatDoNotRunProbes,
			crashed(corev1.ContainerStateTerminated{ExitCode: 143, Reason: "Error"}))},
	{"an init container", podsThatDoNotRunW(), pod("a", on("w1"), waits("PodInitializing", ""), func(p *corev1.Pod) {
		p.Spec.InitContainers = []corev1.Container{{Name: "migrate"}}
		p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "migrate", State: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: 127, StartedAt: ago(time.Minute),
				FinishedAt: ago(50 * time.Second)}}}}
	})},
	{"a ConfigMap", podsThatDoNotRunW(), pod("a", on("w1"),
		waits("CreateContainerConfigError", `configmap "settings" not found`))},
	{"a key of a Secret", podsThatDoNotRunW(), pod("a", on("w1"),
		waits("CreateContainerConfigError", "couldn't find key password in Secret default/db"))},
	{"a volume", podsThatDoNotRunW(said(podsThatDoNotRunA, "FailedMount", `volume "s": secret "default/tls" not found`,
		10*time.Second)),
		pod("a", on("w1"), waits("ContainerCreating", ""))},
	{"a node without NFS",
		podsThatDoNotRunW(said(podsThatDoNotRunA, "FailedMount",
			`MountVolume.SetUp failed for volume "s" : NFS files:/a: the kernel of this node `+
				`has no NFS client: load module nfs (modprobe nfs)`, time.Second)),
		pod("a", on("w1"), waits("ContainerCreating", ""))},
	{"a file server that hangs",
		podsThatDoNotRunW(said(podsThatDoNotRunA, "FailedMount",
			`MountVolume.SetUp failed for volume "s" : persistentvolume "pv": NFS files:/a: `+
				`server files did not answer within 30s`, time.Second)),
		pod("a", on("w1"), waits("ContainerCreating", ""))},
	{"a file server that refuses",
		podsThatDoNotRunW(said(podsThatDoNotRunA, "FailedMount",
			`MountVolume.SetUp failed for volume "s" : NFS [2001:db8::1]:/a: server `+
				`2001:db8::1 does not let this node mount /a: see its exports`, time.Second)),
		pod("a", on("w1"), waits("ContainerCreating", ""))},
	{"a folder that is not there", podsThatDoNotRunW(said(podsThatDoNotRunA, "FailedMount",
		`MountVolume.SetUp failed for volume "s" : NFS files:/a: server files exports no /a`, time.Second)),
		pod("a", on("w1"), waits("ContainerCreating", ""))},
	{"a node without open-iscsi",
		podsThatDoNotRunW(said(podsThatDoNotRunA, "FailedMount",
			`MountVolume.SetUp failed for volume "s" : iSCSI target iqn.2026-01.example:disks at 192.0.2.1:3260, `+
				`LUN 0: asking portal 192.0.2.1:3260 for its targets: iscsiadm is not on this node: install `+
				`open-iscsi (iscsi-initiator-utils), and have iscsid run`, time.Second)),
		pod("a", on("w1"), waits("ContainerCreating", ""))},
	{"a target that lets others in",
		podsThatDoNotRunW(said(podsThatDoNotRunA, "FailedMount",
			`MountVolume.SetUp failed for volume "s" : persistentvolume "pv": iSCSI target `+
				`iqn.2026-01.example:disks at 192.0.2.1:3260, LUN 0: portal 192.0.2.1:3260 has no target for this `+
				`node's initiator`, time.Second)),
		pod("a", on("w1"), waits("ContainerCreating", ""))},
	{"a portal that hangs",
		podsThatDoNotRunW(said(podsThatDoNotRunA, "FailedMount",
			`MountVolume.SetUp failed for volume "s" : iSCSI target iqn.2026-01.example:disks at 192.0.2.1:3260, `+
				`LUN 0: asking portal 192.0.2.1:3260 for its targets: portal 192.0.2.1:3260 did not answer `+
				`within 30s`, time.Second)),
		pod("a", on("w1"), waits("ContainerCreating", ""))},
	{"a sandbox", podsThatDoNotRunW(said(podsThatDoNotRunA, "FailedCreatePodSandBox",
		"Failed to create pod sandbox: no address is free",
		10*time.Second)), pod("a", on("w1"))},
	{"a readiness probe", podsThatDoNotRunW(said(podsThatDoNotRunA, "Unhealthy",
		"Readiness probe failed: connection refused",
		time.Second, "main")),
		pod("a", on("w1"), podsThatDoNotRunProbes, podsThatDoNotRunRuns, ready(corev1.ConditionFalse))},
	{"a readiness gate", podsThatDoNotRunW(), pod("a", on("w1"), ready(corev1.ConditionFalse), func(p *corev1.Pod) {
		p.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "example.com/lb"}}
	})},
	{"grace", podsThatDoNotRunW(), pod("a", on("w1"), podsThatDoNotRunRuns, deleted(20*time.Second, 30*time.Second))},
	{"finalizers", podsThatDoNotRunW(), pod("a", on("w1"), deleted(-time.Hour, 30*time.Second, "example.com/cleanup",
		"batch.kubernetes.io/job-tracking"))},
	{"a volume that stays",
		podsThatDoNotRunW(said(podsThatDoNotRunA, "FailedUnMount",
			`removing volumes of pod 1: CSI volume v: no such CSI driver: `+
				`disks.example.com (looked for in /plugins/*/csi.sock)`, 10*time.Second)),
		pod("a", on("w1"), podsThatDoNotRunOver, deleted(-time.Minute, time.Second))},
	{"something that stays", podsThatDoNotRunW(),
		pod("a", on("w1"), podsThatDoNotRunOver, deleted(-time.Minute, time.Second))},
	{"containers that stay", podsThatDoNotRunW(),
		pod("a", on("w1"), podsThatDoNotRunRuns, deleted(-time.Minute, time.Second))},
	{"a node that is gone", World{}, pod("a", on("w1"), podsThatDoNotRunRuns, deleted(-time.Hour, 30*time.Second))},
	{"a node that says nothing", World{Nodes: []corev1.Node{podsThatDoNotRunDead}},
		pod("a", on("w1"), podsThatDoNotRunRuns, ready(corev1.ConditionTrue))},
	{"a node that says nothing, deletion", World{Nodes: []corev1.Node{podsThatDoNotRunDead}},
		pod("a", on("w1"), podsThatDoNotRunRuns, deleted(-time.Minute, 30*time.Second))},
	{"evicted", podsThatDoNotRunW(), pod("a", alone, on("w1"), func(p *corev1.Pod) {
		p.Status.Phase, p.Status.Reason, p.Status.Message = corev1.PodFailed, "Evicted",
			"The node was low on resource: memory."
	})},
	{"not admitted", podsThatDoNotRunW(), pod("a", on("w1"), func(p *corev1.Pod) {
		p.Status.Phase, p.Status.Reason, p.Status.Message = corev1.PodFailed, "Evicted",
			"Pod was rejected: The node had condition: [MemoryPressure]. "
	})},
	{"evicted for its own limits", podsThatDoNotRunW(), pod("a", on("w1"), func(p *corev1.Pod) {
		p.Status.Phase, p.Status.Reason, p.Status.Message = corev1.PodFailed, "Evicted",
			`Usage of EmptyDir volume "data" exceeds the limit "1Mi". `
	})},
	{"an ephemeral container without an image", podsThatDoNotRunW(), pod("a", on("w1"), ready(corev1.ConditionTrue),
		debugged(corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull",
			Message: "image tools:1: registry.local: manifest not found"}}))},
	{"an ephemeral container without its target", podsThatDoNotRunW(),
		pod("a", on("w1"), ready(corev1.ConditionTrue), debugged(corev1.ContainerState{
			Waiting: &corev1.ContainerStateWaiting{Reason: "CreateContainerConfigError",
				Message: "unable to find target container main"}}))},
	{"an ephemeral container that has ended", podsThatDoNotRunW(),
		pod("a", on("w1"), ready(corev1.ConditionTrue), debugged(corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: 130}}))},
	{"all is well", podsThatDoNotRunW(), pod("a", on("w1"), ready(corev1.ConditionTrue))},
	{"done", podsThatDoNotRunW(), pod("a", on("w1"), func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })},
}

// debugged adds an ephemeral container in a state.
func debugged(state corev1.ContainerState) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.EphemeralContainerStatuses = []corev1.ContainerStatus{
			{Name: "debugger", Image: "tools:1", State: state}}
	}
}

// F126, F128
func TestPodsThatDoNotRun(t *testing.T) {
	transcript(t, "pods", podsThatDoNotRunCases)
}
