package volume

import (
	"strings"
	"testing"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// F110: the control plane expands a mounted volume by its handle; the node adds path and secrets. A
// volume that was expanded while unused is expanded before its pod starts. A failing driver does
// not block the pod then.
func TestNodesGrowVolumes(t *testing.T) {
	v, c, d, claim := withDriver(t, spec.NodeServiceCapability_RPC_EXPAND_VOLUME)
	d.expand = func(q *spec.NodeExpandVolumeRequest) (int64, error) { return q.CapacityRange.RequiredBytes, nil }
	ask := func(handle string) (*spec.NodeExpandVolumeResponse, error) {
		q, err := proto.Marshal(&spec.NodeExpandVolumeRequest{VolumeId: handle, VolumePath: "/etc",
			CapacityRange: &spec.CapacityRange{RequiredBytes: 3 << 30}})
		requireNoError(t, err)
		b, err := v.Call(t.Context(), "odd.example", spec.Node_NodeExpandVolume_FullMethodName, q, 0)
		out := &spec.NodeExpandVolumeResponse{}
		requireNoError(t, proto.Unmarshal(b, out))
		return out, err
	}
	p := newPod("u1", claim)
	c.Put(p)
	if _, err := ask("vol-1"); status.Code(err) != codes.Unavailable ||
		!strings.Contains(err.Error(), "volume vol-1 of CSI driver odd.example is not mounted on this node") {
		t.Errorf("a volume that is not mounted: %v", err)
	}
	pv, _ := c.PersistentVolume("pv")
	pv = pv.DeepCopy()
	pv.Spec.CSI.NodeExpandSecretRef = &v1.SecretReference{Namespace: "kube-system", Name: "key"}
	pv.Spec.Capacity = v1.ResourceList{v1.ResourceStorage: resource.MustParse("2Gi")}
	secret := &v1.Secret{ObjectMeta: newObjectMeta("key", ""), Data: map[string][]byte{"k": []byte("v")}}
	secret.Namespace = "kube-system"
	c.Put(pv, secret)
	_, err := v.MountAll(t.Context(), p)
	requireNoError(t, err)
	if len(d.grown) != 0 {
		t.Error("a volume that has not grown is grown")
	}
	res, err := ask("vol-1")
	requireNoError(t, err)
	q := d.grown[0]
	if res.CapacityBytes != 3<<30 || q.VolumePath != d.targets[0] || q.StagingTargetPath != d.staged[0] ||
		q.Secrets["k"] != "v" ||
		q.VolumeCapability.GetMount() == nil {
		t.Errorf("asked %v, answered %v", q, res)
	}
	d.expand = func(*spec.NodeExpandVolumeRequest) (int64, error) {
		return 0, status.Error(codes.OutOfRange, "too large")
	}
	if _, err := ask("vol-1"); status.Code(err) != codes.OutOfRange {
		t.Errorf("what the driver says comes as %v", err)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	pvc, _ := c.Claim("default", "disk")
	pvc = pvc.DeepCopy()
	pvc.Status.Capacity = v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}
	pvc.Status.AllocatedResourceStatuses = map[v1.ResourceName]v1.ClaimResourceStatus{
		v1.ResourceStorage: v1.PersistentVolumeClaimNodeResizePending}
	c.Put(pvc)
	n := len(d.grown)
	_, err = v.MountAll(t.Context(), p)
	requireNoError(t, err)
	if len(d.grown) != n+1 || d.grown[n].CapacityRange.RequiredBytes != 2<<30 {
		t.Errorf("grown when it is mounted: %v", d.grown[n:])
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
}
