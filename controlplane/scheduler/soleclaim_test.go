package scheduler_test

import (
	"errors"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
)

// soleClaim makes a claim of ReadWriteOncePod with its volume.
func (b *bed) soleClaim(name string) {
	b.t.Helper()
	modes := []v1.PersistentVolumeAccessMode{v1.ReadWriteOncePod}
	size := v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}
	none := ""
	if _, err := client.Create(b.ctx, b.client,
		&v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1.PersistentVolumeSpec{AccessModes: modes, Capacity: size,
				PersistentVolumeReclaimPolicy: v1.PersistentVolumeReclaimRetain,
				PersistentVolumeSource: v1.PersistentVolumeSource{
					HostPath: &v1.HostPathVolumeSource{Path: "/x"}}}}); err != nil {
		b.t.Fatal(err)
	}
	if _, err := client.Create(b.ctx, b.client,
		&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
			Annotations: map[string]string{"pv.kubernetes.io/bind-completed": "yes"}},
			Spec: v1.PersistentVolumeClaimSpec{AccessModes: modes, VolumeName: name, StorageClassName: &none,
				Resources: v1.VolumeResourceRequirements{Requests: size}}}); err != nil {
		b.t.Fatal(err)
	}
}

// A second pod of a claim for one pod waits whatever node there is, goes where the first was once that is gone, and takes
// its place at once where it is more important.
func TestOnePodPerClaim(t *testing.T) {
	b := newBed(t, nil)
	b.node("w1", "2")
	b.node("w2", "2")
	b.soleClaim("sole")
	b.lead()
	uses := func(pod *v1.Pod) {
		pod.Spec.Volumes = []v1.Volume{{Name: "v",
			VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{
				ClaimName: "sole"}}}}
	}
	b.pod("first", "1", important(5), uses)
	b.awaitNode("first", "")
	b.pod("second", "1", important(5), uses)
	const taken = "0/2 nodes are available: 2 node has pod using PersistentVolumeClaim with the same name and " +
		"ReadWriteOncePod access mode."
	b.awaitReason("second", taken+" preemption: 0/2 nodes are available: 2 No preemption victims found "+
		"for incoming pod.")
	b.delete("first")
	b.awaitNode("second", "")
	b.pod("third", "1", important(10), uses)
	where := b.get("second").Spec.NodeName
	b.eventually("the less important one gives way", func() error {
		if pod := b.get("second"); pod.DeletionTimestamp == nil {
			return errors.New("it stays")
		}
		return nil
	})
	b.delete("second")
	b.awaitNode("third", where)
}
