package why

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestClaimsNamespacesNodes(t *testing.T) {
	when := ago(time.Hour)
	claim := func(phase corev1.PersistentVolumeClaimPhase) *corev1.PersistentVolumeClaim {
		return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "data", Namespace: "default", UID: "c",
			CreationTimestamp: when},
			Spec:   corev1.PersistentVolumeClaimSpec{VolumeName: "pv-1"},
			Status: corev1.PersistentVolumeClaimStatus{Phase: phase}}
	}
	told := func(reason, message string) World {
		return World{Events: []corev1.Event{{InvolvedObject: corev1.ObjectReference{UID: "c"}, Reason: reason,
			Message: message, LastTimestamp: ago(time.Second)}}}
	}
	going := claim(corev1.ClaimBound)
	going.DeletionTimestamp, going.Finalizers = &when, []string{"kubernetes.io/pvc-protection"}
	user := pod("db-0", func(p *corev1.Pod) {
		p.Spec.Volumes =
			[]corev1.Volume{{VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}
	})
	unplaced := pod("db-1", unfit("0/1 nodes are available: 1 node(s) did not have enough free storage."))
	unplaced.Spec.Volumes = user.Spec.Volumes
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team", DeletionTimestamp: &when}}
	namespace.Status.Conditions = []corev1.NamespaceCondition{
		{Type: corev1.NamespaceContentRemaining, Status: corev1.ConditionTrue,
			Message: "Some resources are remaining: configmaps. has 1 resource instances (settings)"},
		{Type: corev1.NamespaceDeletionContentFailure, Status: corev1.ConditionFalse, Message: "no"}}
	silent := node("w1", func(n *corev1.Node) {
		n.Spec.Unschedulable = true
		n.Status.Conditions[0] = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown,
			LastTransitionTime: when,
			LastHeartbeatTime:  ago(61 * time.Minute), Message: "Kubelet stopped posting node status."}
	})
	orphaned := node("w1", func(n *corev1.Node) {
		n.Status.Conditions[0] = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown,
			LastTransitionTime: ago(time.Minute),
			LastHeartbeatTime:  when, Reason: "NodeStatusUnknown",
			Message: "the agent's session with the control plane was lost"}
	})
	full := node("w2", func(n *corev1.Node) {
		n.Status.Conditions = append(n.Status.Conditions,
			corev1.NodeCondition{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue,
				Message: "the disk is full"})
	})
	good := node("w3")
	pressed := node("w2", func(n *corev1.Node) {
		n.Status.Conditions = append(n.Status.Conditions,
			corev1.NodeCondition{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionTrue,
				Message: "kubelet has insufficient memory available"})
	})
	victim := pod("victim", func(p *corev1.Pod) {
		p.Spec.NodeName, p.Status.Phase, p.Status.Reason = "w2", corev1.PodFailed, "Evicted"
	})
	transcript(t, "cluster", []subject{
		{"no class", told("ProvisioningFailed", `storageclass.storage.k8s.io "fast" not found`),
			claim(corev1.ClaimPending)},
		{"no driver", told("ProvisioningFailed",
			"failed to provision volume: no node has CSI driver a.example: a driver registers by a socket in its "+
				"kubelet folder's plugins_registry (kubectl get csinodes -o yaml lists the registered drivers)"),
			claim(corev1.ClaimPending)},
		{"no room",
			told("ProvisioningFailed", `failed to provision volume: StorageClass "standard": ResourceExhausted: `+
				`volume pvc-1 wants 20 MiB, and node w1 has 4 MiB left for volumes`), claim(corev1.ClaimPending)},
		{"nobody uses it", told("WaitForFirstConsumer", "waiting for first consumer to be created before binding"),
			claim(corev1.ClaimPending)},
		{"its pod has no node",
			World{Events: told("WaitForFirstConsumer",
				"waiting for first consumer to be created before binding").Events,
				Pods: []corev1.Pod{*unplaced}}, claim(corev1.ClaimPending)},
		{"lost", World{}, claim(corev1.ClaimLost)},
		{"in use", World{Pods: []corev1.Pod{*user}}, going},
		{"bound", World{}, claim(corev1.ClaimBound)},
		{"a namespace that does not go", World{}, namespace},
		{"a node that says nothing", World{Placed: []corev1.Pod{*pod("a", on("w1")),
			*pod("b", on("w1"), deleted(0, 0))}}, &silent},
		{"a node that was lost with its replica", World{}, &orphaned},
		{"a node with a full disk", World{}, &full},
		{"a node with too little memory", World{Placed: []corev1.Pod{*victim}}, &pressed},
		{"a node", World{}, &good},
	})
}
