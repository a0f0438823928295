package volumesnapshot

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	groups "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Finalizers, annotations and class parameters of group snapshots. They are those of the upstream
// snapshot controller and the CSI snapshotter.
const (
	groupPrefix = "groupsnapshot.storage.kubernetes.io/"

	groupFinalizer        = groupPrefix + "volumegroupsnapshot-bound-protection"
	groupContentFinalizer = groupPrefix + "volumegroupsnapshotcontent-bound-protection"
	memberFinalizer       = prefix + "volumesnapshot-in-group-protection"

	groupBeingCreated    = groupPrefix + "volumegroupsnapshot-being-created"
	groupDefaultClass    = groupPrefix + "is-default-class"
	groupSecretName      = groupPrefix + "deletion-secret-name"
	groupSecretNamespace = groupPrefix + "deletion-secret-namespace"

	groupSecretNameParam      = reserved + "group-snapshotter-secret-name"
	groupSecretNamespaceParam = reserved + "group-snapshotter-secret-namespace"
)

// inGroup is an annotation of a VolumeSnapshotContent: the name of the VolumeGroupSnapshotContent
// with which its data were created and are deleted.
const inGroup = "keelson.dev/snapshot-group"

// mostInGroup is the maximum number of claims in a group snapshot. All writers to these volumes
// wait while the group snapshot is taken.
const mostInGroup = 64

// groupContentName returns the name of the VolumeGroupSnapshotContent for a VolumeGroupSnapshot
// with this UID. groupDriverName returns the name of the group snapshot in the CSI request.
func groupContentName(uid types.UID) string { return "groupsnapcontent-" + string(uid) }
func groupDriverName(uid types.UID) string  { return "groupsnapshot-" + string(uid) }

// memberName returns the name of the VolumeSnapshot for one volume of a group snapshot. It is
// derived from the UID of the VolumeGroupSnapshot and the handle of the volume's snapshot.
func memberName(group types.UID, handle string) string {
	return fmt.Sprintf("snapshot-%x", sha256.Sum256([]byte(string(group)+"\x00"+handle)))[:49]
}

// selectClaims returns those of the given claims that VolumeGroupSnapshot g selects, sorted by
// name. It returns an error if g selects no claim or more than mostInGroup.
func selectClaims(g *groups.VolumeGroupSnapshot, claims []*corev1.PersistentVolumeClaim) (
	[]*corev1.PersistentVolumeClaim, error,
) {
	selector, err := metav1.LabelSelectorAsSelector(g.Spec.Source.Selector)
	if err != nil {
		return nil, fmt.Errorf("spec.source.selector: %w", err)
	}
	var out []*corev1.PersistentVolumeClaim
	for _, c := range claims {
		if selector.Matches(labels.Set(c.Labels)) {
			out = append(out, c)
		}
	}
	switch {
	case len(out) == 0:
		return nil, fmt.Errorf("no PersistentVolumeClaim of namespace %s has the labels %s", g.Namespace, selector)
	case len(out) > mostInGroup:
		return nil, fmt.Errorf("%d PersistentVolumeClaims match the labels %s: a group may have at most %d", len(out),
			selector, mostInGroup)
	}
	slices.SortFunc(out, func(a, b *corev1.PersistentVolumeClaim) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// commonDriver returns the CSI driver of all volumes of a group snapshot, or an error if they have
// several drivers or cannot have snapshots.
func commonDriver(claims []*corev1.PersistentVolumeClaim, volumes []*corev1.PersistentVolume) (string, error) {
	for i, v := range volumes {
		if err := checkSource(claims[i], v); err != nil {
			return "", err
		}
		if first := volumes[0].Spec.CSI.Driver; v.Spec.CSI.Driver != first {
			return "",
				fmt.Errorf("the volume of claim %s belongs to CSI driver %s, and the volume of claim %s to %s: a "+
					"group snapshot covers volumes of one driver",
					claims[0].Name, first, claims[i].Name, v.Spec.CSI.Driver)
		}
	}
	return volumes[0].Spec.CSI.Driver, nil
}

// mostTerms is the maximum number of node selector terms in the node affinity of a group snapshot.
const mostTerms = 64

// commonAffinity returns the node affinity of the nodes that reach all volumes. It returns nil if
// every node reaches them.
func commonAffinity(volumes []*corev1.PersistentVolume) (*corev1.VolumeNodeAffinity, error) {
	var all []corev1.NodeSelectorTerm
	seen := map[string]bool{}
	for _, v := range volumes {
		if v.Spec.NodeAffinity == nil || v.Spec.NodeAffinity.Required == nil {
			continue
		}
		terms := v.Spec.NodeAffinity.Required.NodeSelectorTerms
		text, err := json.Marshal(terms)
		if err != nil {
			return nil, err
		}
		if seen[string(text)] { // most volumes are local to one node and have the same terms
			continue
		}
		seen[string(text)] = true
		if all == nil {
			all = terms
			continue
		}
		var both []corev1.NodeSelectorTerm
		for _, a := range all {
			for _, b := range terms {
				both = append(both, corev1.NodeSelectorTerm{MatchExpressions: slices.Concat(a.MatchExpressions,
					b.MatchExpressions),
					MatchFields: slices.Concat(a.MatchFields, b.MatchFields)})
			}
		}
		if all = both; len(all) > mostTerms {
			return nil, fmt.Errorf("the volumes are reached from nodes in more than %d ways", mostTerms)
		}
	}
	if all == nil {
		return nil, nil
	}
	return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: all}}, nil
}

// groupContentOf returns the VolumeGroupSnapshotContent to create for VolumeGroupSnapshot g with
// class c and these volumes.
func groupContentOf(g *groups.VolumeGroupSnapshot, c class, volumes []*corev1.PersistentVolume) (
	*groups.VolumeGroupSnapshotContent, error,
) {
	out := &groups.VolumeGroupSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{Name: groupContentName(g.UID), Finalizers: []string{groupContentFinalizer}},
		Spec: groups.VolumeGroupSnapshotContentSpec{
			VolumeGroupSnapshotRef: corev1.ObjectReference{APIVersion: groups.GroupName + "/v1",
				Kind:      "VolumeGroupSnapshot",
				Namespace: g.Namespace, Name: g.Name, UID: g.UID},
			DeletionPolicy: c.policy, Driver: c.driver, VolumeGroupSnapshotClassName: &c.name,
		},
	}
	for _, v := range volumes {
		out.Spec.Source.VolumeHandles = append(out.Spec.Source.VolumeHandles, v.Spec.CSI.VolumeHandle)
	}
	from, err := commonAffinity(volumes)
	if err != nil {
		return nil, err
	}
	return out, ofGroups.annotateContent(&out.ObjectMeta, c, g, from)
}

// checkGroupOwnership returns an error if content c, which VolumeGroupSnapshot g names, does not
// belong to g.
func checkGroupOwnership(g *groups.VolumeGroupSnapshot, c *groups.VolumeGroupSnapshotContent) error {
	made := c.Spec.Source.GroupSnapshotHandles == nil && g.Spec.Source.VolumeGroupSnapshotContentName != nil
	return ofGroups.checkOwnership(g, c, c.Spec.VolumeGroupSnapshotRef, made)
}

// memberOf returns the VolumeSnapshot to create for one volume of group snapshot g. The
// VolumeSnapshot is deleted with g. claim is the name of the volume's claim, or "" if it is
// unknown.
func memberOf(g *groups.VolumeGroupSnapshot, info groups.VolumeSnapshotInfo, claim string) *snap.VolumeSnapshot {
	yes, name := true, memberName(g.UID, info.SnapshotHandle)
	s := &snap.VolumeSnapshot{ObjectMeta: metav1.ObjectMeta{Namespace: g.Namespace, Name: name,
		Finalizers: []string{boundFinalizer, sourceFinalizer, memberFinalizer},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: groups.GroupName + "/v1", Kind: "VolumeGroupSnapshot",
			Name: g.Name, UID: g.UID, Controller: &yes}}}}
	if s.Spec.Source.PersistentVolumeClaimName = &claim; claim == "" {
		s.Spec.Source = snap.VolumeSnapshotSource{VolumeSnapshotContentName: &name}
	}
	return s
}

// memberContentOf returns the VolumeSnapshotContent for VolumeSnapshot s, which belongs to the
// group snapshot with content c. It has the form of a pre-provisioned content, because its data
// already exist. They are deleted with the group snapshot.
func memberContentOf(
	s *snap.VolumeSnapshot, c *groups.VolumeGroupSnapshotContent, handle string,
) *snap.VolumeSnapshotContent {
	name := ptr.Deref(s.Spec.Source.VolumeSnapshotContentName, contentName(s))
	out := &snap.VolumeSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{contentFinalizer},
			Annotations: map[string]string{inGroup: c.Name}},
		Spec: snap.VolumeSnapshotContentSpec{
			VolumeSnapshotRef: corev1.ObjectReference{APIVersion: snap.GroupName + "/v1", Kind: "VolumeSnapshot",
				Namespace: s.Namespace, Name: s.Name, UID: s.UID},
			DeletionPolicy: c.Spec.DeletionPolicy, Driver: c.Spec.Driver,
			Source: snap.VolumeSnapshotContentSource{SnapshotHandle: &handle},
		},
	}
	if v, ok := c.Annotations[engine.ReachedFromAnnotation]; ok {
		out.Annotations[engine.ReachedFromAnnotation] = v
	}
	if v, ok := c.Annotations[groupSecretName]; ok { // the Secret with which the driver was called for the group
		out.Annotations[secretName], out.Annotations[secretNamespace] = v, c.Annotations[groupSecretNamespace]
	}
	return out
}

// ownedBy reports whether VolumeSnapshot s belongs to the VolumeGroupSnapshot with this UID.
func ownedBy(s *snap.VolumeSnapshot, uid types.UID) bool {
	return slices.ContainsFunc(s.OwnerReferences, func(o metav1.OwnerReference) bool { return o.UID == uid })
}
