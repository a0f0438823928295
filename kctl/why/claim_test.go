package why

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// boundClaim is a claim that has its volume.
func boundClaim() *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "data", Namespace: "default", UID: "c",
		CreationTimestamp: ago(time.Hour)},
		Spec:   corev1.PersistentVolumeClaimSpec{VolumeName: "pv-1"},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound}}
}

// claimOf is a claim whose volume is to be made of something named old.
func claimOf(group, kind string) *corev1.PersistentVolumeClaim {
	c := boundClaim()
	c.Spec.VolumeName, c.Status.Phase = "", corev1.ClaimPending
	c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: kind, Name: "old"}
	if group != "" {
		c.Spec.DataSource.APIGroup = &group
	}
	return c
}

// attachedTo is that of the volume to a node.
func attachedTo(node string, status storagev1.VolumeAttachmentStatus) storagev1.VolumeAttachment {
	return storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: "csi-" + node,
		CreationTimestamp: ago(time.Minute)},
		Spec: storagev1.VolumeAttachmentSpec{NodeName: node,
			Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: new("pv-1")}}, Status: status}
}

// usesClaim has a pod use the claim.
func usesClaim(p *corev1.Pod) {
	p.Spec.Volumes =
		[]corev1.Volume{{VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}
}

// toldOfClaim is a world in which an event says something of the claim, and before it others, a reason and a message each.
func toldOfClaim(reason, message string, others ...string) World {
	w := World{}
	for i := 0; i < len(others); i += 2 {
		w.Events = append(w.Events, corev1.Event{InvolvedObject: corev1.ObjectReference{UID: "c"}, Reason: others[i],
			Message: others[i+1], LastTimestamp: ago(0)})
	}
	w.Events = append(w.Events, corev1.Event{InvolvedObject: corev1.ObjectReference{UID: "c"}, Reason: reason,
		Message: message, LastTimestamp: ago(time.Second)})
	return w
}

// attributedClaim is a claim that wants the attributes gold, and has others.
func attributedClaim(has string, state corev1.PersistentVolumeClaimModifyVolumeStatus) *corev1.PersistentVolumeClaim {
	c, gold := boundClaim(), "gold"
	c.UID, c.Spec.VolumeAttributesClassName = "c", &gold
	if has != "" {
		c.Status.CurrentVolumeAttributesClassName = &has
	}
	if state != "" {
		c.Status.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{TargetVolumeAttributesClassName: gold, Status: state}
	}
	if state == corev1.PersistentVolumeClaimModifyVolumeInfeasible {
		c.Status.Conditions = []corev1.PersistentVolumeClaimCondition{
			{Type: corev1.PersistentVolumeClaimVolumeModifyVolumeError, Status: corev1.ConditionTrue,
				Message: "InvalidArgument: there is no such throughput", LastTransitionTime: ago(time.Minute)}}
	}
	return c
}

// growingClaim is a claim that wants more than it has.
func growingClaim(said ...corev1.PersistentVolumeClaimCondition) *corev1.PersistentVolumeClaim {
	c := boundClaim()
	c.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("3Gi")}
	c.Status.Capacity, c.Status.Conditions = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
		said
	return c
}

// withUnplaced adds a pod that no node has room for.
func withUnplaced(w World) World {
	p := pod("waiting", usesClaim)
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
		Reason:  "Unschedulable",
		Message: "0/3 nodes are available: 3 node(s) did not have enough free storage."}}
	w.Pods = append(w.Pods, *p)
	return w
}

var claimsWhen, claimsBound = ago(time.Hour), boundClaim()

var claimsHas, claimsOther = pod("db-0", on("w1"), usesClaim, ready(corev1.ConditionTrue)),
	pod("late", on("w2"), usesClaim)

var claimsMulti = said(claimsOther, "FailedAttachVolume",
	`Multi-Attach error for volume "pv-1": its access modes let one node have it, and node w1 holds it for pod `+
		`default/db-0: it is released when that pod has ended`, time.Second)

var claimsLostMulti = said(claimsOther, "FailedAttachVolume",
	`Multi-Attach error for volume "pv-1": its access modes let one node have it, and lost node w1 holds it for `+
		`pod default/db-0 until it is fenced, in 12s at the latest`, time.Second)

var claimsWaits = said(claimsOther, "FailedMount",
	`volume "data": it is not attached to this node: it has no VolumeAttachment `+
		`to this node yet`, 0)

var claimsAt = []storagev1.VolumeAttachment{attachedTo("w1", storagev1.VolumeAttachmentStatus{Attached: true})}

var claimsSilent = node("w1", func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown })

var claimsRefused = attachedTo("w2",
	storagev1.VolumeAttachmentStatus{
		AttachError: &storagev1.VolumeError{Message: "node w2: FailedPrecondition: node w9 has volume pv-1"}})

var claimsNowhere = attachedTo("w2", storagev1.VolumeAttachmentStatus{AttachError: &storagev1.VolumeError{
	Message: "node w2 has no CSI driver a.example: a driver registers by a socket in its kubelet folder's " +
		"plugins_registry"}})

var claimsStuck = func() storagev1.VolumeAttachment {
	a := attachedTo("w1", storagev1.VolumeAttachmentStatus{Attached: true,
		DetachError: &storagev1.VolumeError{Message: "node w2: Internal: the disk is busy"}})
	a.DeletionTimestamp = &claimsWhen
	return a
}()

var claimsBoth = []corev1.Pod{*claimsHas, *claimsOther}

const claimsSnapshots = "snapshot.storage.k8s.io"

// claimsCases are the cases of TestClaims.
var claimsCases = []subject{
	{"attached", World{Pods: claimsBoth[:1], Attachments: claimsAt}, claimsBound},
	{"wanted by two nodes", World{Pods: claimsBoth, Attachments: claimsAt, Events: []corev1.Event{claimsMulti},
		Nodes: []corev1.Node{node("w1")}}, claimsBound},
	{"wanted, and a lost node has it", World{Pods: claimsBoth, Attachments: claimsAt,
		Events: []corev1.Event{claimsLostMulti},
		Nodes:  []corev1.Node{claimsSilent}}, claimsBound},
	{"wanted, and who has it may not be read",
		World{Pods: claimsBoth, Events: []corev1.Event{claimsMulti}, Unread: []string{Attachments, Nodes}},
		claimsBound},
	{"got after all", World{Pods: claimsBoth, Attachments: claimsAt,
		Events: []corev1.Event{claimsMulti, said(claimsOther, "SuccessfulAttachVolume",
			`AttachVolume.Attach succeeded for volume "pv-1"`, 0)}}, claimsBound},
	{"wanted by two nodes, and the node has said that it waits",
		World{Pods: claimsBoth, Attachments: claimsAt, Events: []corev1.Event{claimsMulti, claimsWaits},
			Nodes: []corev1.Node{node("w1")}},
		claimsBound},
	{"its pod", World{Events: []corev1.Event{claimsMulti, claimsWaits}, Nodes: []corev1.Node{node("w2")}}, claimsOther},
	{"its pod, when it has the volume",
		World{Events: []corev1.Event{claimsMulti, claimsWaits,
			said(claimsOther, "SuccessfulAttachVolume", `AttachVolume.Attach succeeded for volume "pv-1"`, 0)},
			Nodes: []corev1.Node{node("w2")}}, claimsOther},
	{"refused by the driver", World{Pods: claimsBoth[1:], Attachments: []storagev1.VolumeAttachment{claimsRefused},
		Events: []corev1.Event{said(claimsOther, "FailedAttachVolume",
			`AttachVolume.Attach failed for volume "pv-1" : node w2: FailedPrecondition: node w9 has volume pv-1`,
			time.Second)}}, claimsBound},
	{"no driver on the node", World{Pods: claimsBoth[1:], Attachments: []storagev1.VolumeAttachment{claimsNowhere}},
		claimsBound},
	{"not given up", World{Attachments: []storagev1.VolumeAttachment{claimsStuck}}, claimsBound},
	{"not mounted",
		World{Pods: claimsBoth[1:], Events: []corev1.Event{said(claimsOther, "FailedMount",
			`MountVolume.SetUp failed for volume "pv-1": wrong fs type`, time.Second)}}, claimsBound},
	{"its file system needs a repair", World{Pods: claimsBoth[1:],
		Events: []corev1.Event{said(claimsOther, "FailedMount",
			`MountVolume.SetUp failed for volume "data" : CSI driver local.csi.keelson.dev: NodeStageVolume of `+
				`volume pv-1: rpc error: code = Internal desc = staging volume pv-1: mounting `+
				`/var/lib/keelson/local-volumes/.images/pv-1: structure needs cleaning; its file system needs a `+
				`repair that may lose data, which is yours to run: e2fsck -f `+
				`/var/lib/keelson/local-volumes/.images/pv-1: e2fsck: exit status 4`, time.Second)}}, claimsBound},
	{"a local disk's file system needs a repair",
		World{Pods: claimsBoth[1:], Events: []corev1.Event{said(claimsOther, "FailedMount",
			`MountVolume.SetUp failed for volume "data" : local persistentvolume "pv-1": the file system on `+
				`/dev/sdb needs a repair that may lose data, which is yours to run: e2fsck -f /dev/sdb: `+
				`fsck.ext4: exit status 4`, time.Second)}}, claimsBound},
	{"on a disk that is read-only", World{Pods: claimsBoth[1:],
		Events: []corev1.Event{said(claimsOther, "FailedMount",
			`MountVolume.SetUp failed for volume "data" : CSI driver local.csi.keelson.dev: NodeStageVolume of `+
				`volume pv-1: rpc error: code = Internal desc = staging volume pv-1: `+
				`/var/lib/keelson/local-volumes, where the node has its volumes, is on a disk that is read-only: `+
				`the node's kernel log may say why; mount it for writing (open `+
				`/var/lib/keelson/local-volumes/.images/pv-1: read-only file system)`, time.Second)}}, claimsBound},
	{"its class is missing", toldOfClaim("ProvisioningFailed", `storageclass.storage.k8s.io "fast" not found`),
		claimOf("", "PersistentVolumeClaim")},
	{"its driver is missing", toldOfClaim("ProvisioningFailed",
		`failed to provision volume: no node has CSI driver a.example: a driver registers by a socket in its `+
			`kubelet folder's plugins_registry (kubectl get csinodes -o yaml lists the registered drivers)`),
		claimOf("", "PersistentVolumeClaim")},
	{"the disk is full", toldOfClaim("ProvisioningFailed",
		`failed to provision volume: StorageClass "now": ResourceExhausted: volume pvc-c wants 10240 MiB, and `+
			`node w1 has 512 MiB left for volumes`), claimOf("", "PersistentVolumeClaim")},
	{"the disk is read-only", toldOfClaim("ProvisioningFailed",
		`failed to provision volume: StorageClass "now": ResourceExhausted: volume pvc-c on node w1: `+
			`/var/lib/keelson/local-volumes, where the node has its volumes, is on a disk that is read-only: the `+
			`node's kernel log may say why; mount it for writing`), claimOf("", "PersistentVolumeClaim")},
	{"a mount option is wrong", toldOfClaim("ProvisioningFailed",
		`failed to provision volume: StorageClass "now": node w1: InvalidArgument: mount option "fast" is not `+
			`valid for ext4 (ext4: Unknown parameter 'fast'): correct the mountOptions of the `+
			`claim's StorageClass`), claimOf("", "PersistentVolumeClaim")},
	{"no node has room", withUnplaced(toldOfClaim("WaitForFirstConsumer",
		"waiting for first consumer to be created before binding")), claimOf("", "PersistentVolumeClaim")},
	{"larger than there is room for", toldOfClaim("VolumeResizeFailed",
		"node w1: ResourceExhausted: volume pv-1 wants 2048 MiB, and node w1 has 512 MiB left for volumes"),
		growingClaim()},
	{"larger, and the node's part is to come", World{},
		growingClaim(corev1.PersistentVolumeClaimCondition{
			Type: corev1.PersistentVolumeClaimFileSystemResizePending, Status: corev1.ConditionTrue,
			LastTransitionTime: ago(time.Minute)})},
	{"larger, by another's resizer", toldOfClaim("ExternalExpanding",
		"waiting for an external controller to expand volume pv-1 to 3Gi: that of CSI driver a.example"),
		growingClaim()},
	{"of a snapshot, and there are none", toldOfClaim("ProvisioningFailed",
		"failed to provision volume: the cluster does not serve VolumeSnapshots: run 'kctl snapshot install'"),
		claimOf(claimsSnapshots, "VolumeSnapshot")},
	{"of a snapshot that is not there", toldOfClaim("ProvisioningFailed",
		`failed to provision volume: VolumeSnapshot old cannot be read: volumesnapshots.snapshot.storage.k8s.io `+
			`"old" not found`), claimOf(claimsSnapshots, "VolumeSnapshot")},
	{"of a claim that is not there", toldOfClaim("ProvisioningFailed",
		`failed to provision volume: PersistentVolumeClaim old cannot be read: `+
			`persistentvolumeclaims "old" not found`,
		"ExternalProvisioning", "waiting"), claimOf("", "PersistentVolumeClaim")},
	{"of what nobody knows", toldOfClaim("UnrecognizedDataSourceKind",
		`the claim's data source is Page.example.com "old", and the cluster does not serve this kind: install the `+
			`populator that defines it`,
		"ExternalProvisioning", "waiting for a volume to be made"), claimOf("example.com", "Page")},
	{"of what a populator brings", toldOfClaim("Provisioning",
		`the claim's data source is Page.example.com "old": waiting for the populator of that kind, which creates `+
			`and fills the volume`,
		"ExternalProvisioning", "waiting for a volume to be made"), claimOf("example.com", "Page")},
	{"to be made with attributes that are not there",
		toldOfClaim("ProvisioningFailed", `failed to provision volume: VolumeAttributesClass "gold" does not `+
			`exist: create it, or set another class in the claim`), claimOf("", "PersistentVolumeClaim")},
	{"of attributes that are not there", toldOfClaim("VolumeModifyFailed",
		`VolumeAttributesClass "gold" does not exist: create it, or set another class in the claim`),
		attributedClaim("", corev1.PersistentVolumeClaimModifyVolumePending)},
	{"of attributes that its driver refuses", World{},
		attributedClaim("silver", corev1.PersistentVolumeClaimModifyVolumeInfeasible)},
	{"of attributes that it never had", World{},
		attributedClaim("", corev1.PersistentVolumeClaimModifyVolumeInfeasible)},
	{"of attributes that another gives it", toldOfClaim("ExternalModifying",
		`waiting for an external controller to apply to volume pv-1 VolumeAttributesClass "gold": the controller `+
			`of CSI driver a.example`), attributedClaim("", "")},
	{"being made", toldOfClaim("Provisioning",
		`CSI driver a.example on node w1 is asked for a volume for claim "default/data"`),
		claimOf("", "PersistentVolumeClaim")},
}

// F126: a claim whose volume pods do not get, or which is to be made of what is not there.
func TestClaims(t *testing.T) {
	transcript(t, "claims", claimsCases)
}
