// Package volumeprovision creates volumes for claims and deletes released volumes, for CSI drivers
// that have no provisioner of their own (engine.IsServedByAgent). The agent of a node forwards
// the calls to the driver's socket.
//
// No volume is leaked. Before a driver is first called for a claim, the claim gets a finalizer and
// an annotation with the driver, the node and the parameters. Both are removed when the
// PersistentVolume exists, or when the driver has no such volume. The PersistentVolume keeps a
// finalizer until the driver has deleted the volume. Every call can be repeated, because the
// volume's name is derived from the claim's UID.
package volumeprovision

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/internal/saturate"
)

const (
	// ClaimFinalizer is on claims for which a driver has been called or is about to be called. It
	// is removed when the PersistentVolume exists or the driver has no volume for the claim.
	ClaimFinalizer = "keelson.dev/provisioning"
	// begunAnnotation on a claim with ClaimFinalizer holds a startedProvision as JSON.
	begunAnnotation = "keelson.dev/provisioning"
	// VolumeFinalizer is the finalizer of dynamically provisioned PersistentVolumes. All
	// provisioners use this name.
	VolumeFinalizer = "external-provisioner.volume.kubernetes.io/finalizer"
	// reserved is the prefix of StorageClass parameters that the provisioner evaluates and does not
	// pass to the driver.
	reserved    = "csi.storage.k8s.io/"
	fsTypeParam = reserved + "fstype"
)

// startedProvision holds the parameters of the CreateVolume call for a claim. They are stored in
// the claim before the call, so that every repetition of the call has the same parameters.
type startedProvision struct {
	Driver     string            `json:"driver"`
	Node       string            `json:"node"`
	Parameters map[string]string `json:"parameters,omitempty"`
	Segments   map[string]string `json:"segments,omitempty"` // topology of the node: values by topology key
	// driver's ID of the snapshot or volume from which the volume is filled
	Snapshot string   `json:"snapshot,omitempty"`
	Volume   string   `json:"volume,omitempty"`
	Options  []string `json:"mountOptions,omitempty"`
	// Class is the claim's VolumeAttributesClass. Mutable are the parameters of that class.
	Class   string            `json:"class,omitempty"`
	Mutable map[string]string `json:"mutable,omitempty"`
	// Secrets are the Secrets for later calls of the driver, by kind of call. They are stored
	// because annotations of the claim may determine them and may change.
	Secrets secrets `json:"secrets,omitempty"`
}

// begunFor returns the startedProvision that a claim stores, or nil if provisioning has not
// started.
func begunFor(c *corev1.PersistentVolumeClaim) (*startedProvision, error) {
	if !slices.Contains(c.Finalizers, ClaimFinalizer) {
		return nil, nil
	}
	b := &startedProvision{}
	if err := json.Unmarshal([]byte(c.Annotations[begunAnnotation]), b); err != nil {
		return nil, fmt.Errorf("annotation %s of claim %s/%s: %w", begunAnnotation, c.Namespace, c.Name, err)
	}
	return b, nil
}

// volumeName returns the name of the PersistentVolume for a claim. The driver gets the same name.
func volumeName(c *corev1.PersistentVolumeClaim) string { return "pvc-" + string(c.UID) }

// matchesClass reports whether b has the driver, parameters and mount options of a StorageClass.
// The StorageClass may have been changed or recreated since provisioning started.
func (b *startedProvision) matchesClass(class *storagev1.StorageClass) bool {
	return b.Driver == class.Provisioner && maps.Equal(b.Parameters, class.Parameters) &&
		slices.Equal(b.Options, class.MountOptions)
}

// claimAction is the next action of the provisioner for a claim.
type claimAction int

const (
	noAction     claimAction = iota
	startAction              // choose a node, and store a startedProvision in the claim
	createAction             // call the driver and create the PersistentVolume
	undoAction               // delete the volume that the driver may have created
	finishAction             // the PersistentVolume exists: remove the startedProvision from the claim
)

// planClaim returns the next action for claim c. class is the StorageClass of c, or nil. noted
// reports that c stores a startedProvision, and made that the PersistentVolume for c exists. served
// reports whether this controller provisions volumes for the driver of the class.
func planClaim(c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, noted, made, served bool) claimAction {
	wanted := c.DeletionTimestamp == nil && c.Spec.VolumeName == "" && class != nil && served &&
		c.Annotations[volume.AnnStorageProvisioner] == class.Provisioner &&
		volume.GetPersistentVolumeClaimClass(c) == class.Name &&
		(!waitsForConsumer(class) || c.Annotations[volume.AnnSelectedNode] != "")
	switch {
	case noted && made:
		return finishAction
	case noted && !wanted:
		return undoAction
	case made || !wanted:
		return noAction
	case noted:
		return createAction
	}
	return startAction
}

// waitsForConsumer reports whether a StorageClass has binding mode WaitForFirstConsumer: a volume
// is created only after the scheduler has chosen the node of the claim's pod.
func waitsForConsumer(class *storagev1.StorageClass) bool {
	return class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
}

// withProvisionNote returns a copy of claim c with ClaimFinalizer and with b as begunAnnotation.
func withProvisionNote(c *corev1.PersistentVolumeClaim, b startedProvision) (*corev1.PersistentVolumeClaim, error) {
	text, err := json.Marshal(b)
	if err != nil {
		return nil, err
	}
	next := c.DeepCopy()
	metav1.SetMetaDataAnnotation(&next.ObjectMeta, begunAnnotation, string(text))
	if !slices.Contains(next.Finalizers, ClaimFinalizer) {
		next.Finalizers = append(next.Finalizers, ClaimFinalizer)
	}
	return next, nil
}

// withoutProvisionNote returns a copy of claim c without ClaimFinalizer and begunAnnotation. If
// elsewhere is true, the copy also lacks the selected node, so that the scheduler chooses a node
// again.
func withoutProvisionNote(c *corev1.PersistentVolumeClaim, elsewhere bool) *corev1.PersistentVolumeClaim {
	next := c.DeepCopy()
	delete(next.Annotations, begunAnnotation)
	if elsewhere {
		delete(next.Annotations, volume.AnnSelectedNode)
	}
	next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == ClaimFinalizer })
	return next
}

// unknownParameter returns a parameter of the class that has the reserved prefix and is not
// supported. It returns "" if none exists.
func unknownParameter(class *storagev1.StorageClass) string {
	for _, k := range slices.Sorted(maps.Keys(class.Parameters)) {
		if strings.HasPrefix(k, reserved) && k != fsTypeParam && !namesSecret(k) {
			return k
		}
	}
	return ""
}

// createRequest returns the CreateVolume request for claim c with the parameters of b.
func createRequest(c *corev1.PersistentVolumeClaim, b *startedProvision) *csi.CreateVolumeRequest {
	size := c.Spec.Resources.Requests[corev1.ResourceStorage]
	most := c.Spec.Resources.Limits[corev1.ResourceStorage]
	q := &csi.CreateVolumeRequest{Name: volumeName(c), Parameters: map[string]string{}, MutableParameters: b.Mutable,
		CapacityRange: &csi.CapacityRange{RequiredBytes: saturate.Value(&size), LimitBytes: saturate.Value(&most)}}
	for k, v := range b.Parameters {
		if !strings.HasPrefix(k, reserved) {
			q.Parameters[k] = v
		}
	}
	for _, m := range c.Spec.AccessModes {
		q.VolumeCapabilities = append(q.VolumeCapabilities, volumeCapability(c, m, b))
	}
	switch {
	case b.Snapshot != "":
		q.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: b.Snapshot}}}
	case b.Volume != "":
		q.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: b.Volume}}}
	}
	if len(b.Segments) > 0 {
		here := []*csi.Topology{{Segments: b.Segments}}
		q.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: here, Preferred: here}
	}
	return q
}

func volumeCapability(
	c *corev1.PersistentVolumeClaim, mode corev1.PersistentVolumeAccessMode, b *startedProvision,
) *csi.VolumeCapability {
	m := csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	switch mode {
	case corev1.ReadOnlyMany:
		m = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	case corev1.ReadWriteMany:
		m = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	}
	out := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: m}}
	if c.Spec.VolumeMode != nil && *c.Spec.VolumeMode == corev1.PersistentVolumeBlock {
		out.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		out.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{
			FsType: b.Parameters[fsTypeParam], MountFlags: b.Options}}
	}
	return out
}

// volumeOf returns the PersistentVolume for volume v, which a driver created for claim c with the
// parameters of b.
func volumeOf(
	c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, b *startedProvision, v *csi.Volume,
) *corev1.PersistentVolume {
	size := c.Spec.Resources.Requests[corev1.ResourceStorage]
	if v.GetCapacityBytes() > 0 {
		size = *resource.NewQuantity(v.GetCapacityBytes(), resource.BinarySI)
	}
	reclaim := ptr.Deref(class.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete)
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: volumeName(c), Finalizers: []string{VolumeFinalizer},
			Annotations: map[string]string{volume.AnnDynamicallyProvisioned: b.Driver}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: corev1.ResourceList{corev1.ResourceStorage: size}, AccessModes: c.Spec.AccessModes,
			VolumeMode:                    c.Spec.VolumeMode,
			PersistentVolumeReclaimPolicy: reclaim, StorageClassName: class.Name, MountOptions: class.MountOptions,
			ClaimRef: &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: c.Namespace,
				Name: c.Name, UID: c.UID},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: b.Driver, VolumeHandle: v.GetVolumeId(),
					FSType: b.Parameters[fsTypeParam], VolumeAttributes: v.GetVolumeContext()}},
		},
	}
	b.Secrets.annotateVolume(pv)
	if b.Class != "" {
		pv.Spec.VolumeAttributesClassName = &b.Class
	}
	var terms []corev1.NodeSelectorTerm
	for _, t := range v.GetAccessibleTopology() {
		var term corev1.NodeSelectorTerm
		for _, k := range slices.Sorted(maps.Keys(t.GetSegments())) {
			term.MatchExpressions = append(term.MatchExpressions,
				corev1.NodeSelectorRequirement{Key: k, Operator: corev1.NodeSelectorOpIn,
					Values: []string{t.GetSegments()[k]}})
		}
		if len(term.MatchExpressions) > 0 {
			terms = append(terms, term)
		}
	}
	if len(terms) > 0 {
		pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: terms}}
	}
	return pv
}

// volumeAction is the next action of the provisioner for a PersistentVolume.
type volumeAction int

const (
	leaveVolume  volumeAction = iota
	forgetVolume              // remove VolumeFinalizer and keep the data
	deleteData                // call DeleteVolume, then remove VolumeFinalizer
)

// planVolume returns the next action for PersistentVolume v of a driver for which this controller
// provisions.
func planVolume(v *corev1.PersistentVolume) volumeAction {
	ours := slices.Contains(v.Finalizers, VolumeFinalizer)
	if !metav1.HasAnnotation(v.ObjectMeta, volume.AnnDynamicallyProvisioned) || v.Spec.CSI == nil ||
		v.Spec.CSI.Driver != v.Annotations[volume.AnnDynamicallyProvisioned] {
		return leaveVolume
	}
	free := v.Status.Phase == corev1.VolumeReleased || v.Status.Phase == corev1.VolumeFailed ||
		v.DeletionTimestamp != nil && (v.Status.Phase == corev1.VolumeAvailable || v.Spec.ClaimRef == nil)
	switch {
	case v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete && free &&
		(ours || v.DeletionTimestamp == nil):
		return deleteData
	case v.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete &&
		v.DeletionTimestamp != nil && ours:
		return forgetVolume
	}
	return leaveVolume
}

// chooseNode chooses one of the given nodes for the volume of claim c, and returns the parameters
// of the driver call there. If the scheduler has selected a node for the claim, only that node is
// considered. Otherwise the allowedTopologies of the class restrict the nodes. Ready nodes are
// preferred, then nodes with more free capacity. If no node is suitable, why is the reason;
// otherwise it is "".
func chooseNode(c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, nodes []candidate) (
	b startedProvision, why string,
) {
	b = startedProvision{Driver: class.Provisioner, Parameters: class.Parameters, Options: class.MountOptions}
	selected := c.Annotations[volume.AnnSelectedNode]
	best, unlabelled := -1, ""
	for i, n := range nodes {
		missing := engine.MissingTopologyLabel(n.driver, n.node)
		switch {
		case selected != "" && n.node.Name != selected,
			selected == "" && !isTopologyAllowed(class.AllowedTopologies, n.node.Labels):
			continue
		case missing != "":
			unlabelled = fmt.Sprintf("node %s lacks topology label %s of CSI driver %s: the driver's registration "+
				"sets the label", n.node.Name, missing, class.Provisioner)
		case best < 0 || n.isPreferredTo(nodes[best]):
			best = i
		}
	}
	switch {
	case best >= 0:
		b.Node, b.Segments = nodes[best].node.Name, engine.TopologySegments(nodes[best].driver, nodes[best].node)
		return b, ""
	case unlabelled != "":
		return b, unlabelled
	case selected != "":
		return b,
			fmt.Sprintf("node %s, which was chosen for the pod, has no CSI driver %s: a driver registers by a socket "+
				"in its kubelet folder's plugins_registry "+
				"(kubectl get csinode %s -o yaml lists the registered drivers)", selected, class.Provisioner, selected)
	case len(nodes) > 0:
		return b, fmt.Sprintf("no node with CSI driver %s is within the allowedTopologies of StorageClass %s",
			class.Provisioner, class.Name)
	}
	return b,
		fmt.Sprintf("no node has CSI driver %s: a driver registers by a socket in its kubelet folder's "+
			"plugins_registry "+
			"(kubectl get csinodes -o yaml lists the registered drivers)", class.Provisioner)
}

// candidate is a node that has registered the driver of the StorageClass.
type candidate struct {
	node   *corev1.Node
	driver *storagev1.CSINodeDriver
	room   int64 // free capacity in bytes, as far as known
}

// isPreferredTo reports whether n precedes o in the choice of a node. A ready node comes first,
// then the node with more free capacity, then the node with the lesser name.
func (n candidate) isPreferredTo(o candidate) bool {
	if a := api.IsNodeReady(n.node); a != api.IsNodeReady(o.node) {
		return a
	}
	return n.room > o.room || n.room == o.room && n.node.Name < o.node.Name
}

// isTopologyAllowed reports whether a node with these labels is within terms, the allowedTopologies
// of a StorageClass. Empty terms allow every node.
func isTopologyAllowed(terms []corev1.TopologySelectorTerm, nodeLabels map[string]string) bool {
	if len(terms) == 0 {
		return true
	}
	return slices.ContainsFunc(terms, func(t corev1.TopologySelectorTerm) bool {
		return !slices.ContainsFunc(t.MatchLabelExpressions, func(e corev1.TopologySelectorLabelRequirement) bool {
			return !slices.Contains(e.Values, nodeLabels[e.Key])
		})
	})
}

func labelsOf(n *corev1.Node) labels.Set { return labels.Set(n.Labels) }
