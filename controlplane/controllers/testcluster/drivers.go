package testcluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
)

const (
	OwnDriver   = "local.csi.keelson.dev"
	NodeSegment = "topology." + OwnDriver + "/node"
)

// Drivers simulates the CSI drivers of all nodes: OwnDriver and DiskDriver. The volumes of
// OwnDriver are local to a node, like those of the included driver.
type Drivers struct {
	Mu              sync.Mutex
	Volumes         map[string]*StoredVolume // volumes by name
	Snapshots       map[string]*StoredVolume // snapshots, by name
	SnapshotDelay   int                      // number of further CreateSnapshot calls until a snapshot is ready
	SnapshotSecrets map[string]string        // Secret of the last CreateSnapshot call
	Capacity        int64                    // capacity for volumes on each node, in bytes
	Disks           *Disks                   // state of DiskDriver; nil means that no node has this driver
	NoModify        bool                     // the driver cannot modify volumes
	ModifyCalls     int                      // calls of ControllerModifyVolume
	NoGroups        bool                     // the driver does not support group snapshots
	Secrets         map[string]string        // required value of key "key" in the Secret, by method
	Calls           int                      // number of performed calls
	Faults          DriverFaults             // faults to inject into calls of OwnDriver
}

// DriverFaults are the faults of the simulated driver OwnDriver. The zero value means no faults.
type DriverFaults struct {
	FullNodes          map[string]bool // nodes without free capacity
	CallError          error           // error that every call returns; nil = none
	LoseResponses      bool            // calls are performed, but return an error
	LossSource         *rand.Rand      // loses calls before or after they are performed; nil loses none
	NodeExpandError    error           // result of NodeExpandVolume (see ErrGrows); nil: nodes need not expand volumes
	ModifyError        error           // error of ControllerModifyVolume; nil = none
	CloneError         error           // error of CreateVolume with a source; nil = none
	LoseGroupResponses bool            // CreateVolumeGroupSnapshot is performed, but returns an error
	CapacityError      error           // error of GetCapacity for a class with parameters; nil = none
	RefusedMountOption string          // a mount option that the driver refuses
}

// ErrGrows is a value for DriverFaults.NodeExpandError: nodes must expand the volumes, and
// NodeExpandVolume succeeds.
var ErrGrows = errors.New("it grows")

// StoredVolume is a volume or a snapshot of the simulated driver.
type StoredVolume struct {
	Node      string
	Size      int64
	Source    string // name of the source volume or snapshot
	CallsLeft int    // further calls until the snapshot is ready
	Attribute string // value of the class parameter "kind" that was applied to the volume
	Group     string // group snapshot to which the snapshot belongs
}

// Volume returns a stored volume by name, or nil.
func (d *Drivers) Volume(name string) *StoredVolume {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	return d.Volumes[name]
}

// CountVolumes returns the number of stored volumes.
func (d *Drivers) CountVolumes() int {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	return len(d.Volumes)
}

// Change calls f with the lock held.
func (d *Drivers) Change(f func()) {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	f()
}

// CallDriver implements api.NodeDrivers.
func (d *Drivers) CallDriver(
	ctx context.Context, node, driver, method string, request []byte, confirm func(context.Context) error,
) ([]byte, error) {
	if err := confirm(ctx); err != nil {
		return nil, err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	d.Calls++
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if driver == DiskDriver && d.Disks != nil {
		return d.Disks.callDriver(node, method, request)
	}
	if driver != OwnDriver {
		return nil, &api.DriverMissing{Node: node, Message: driver + " was looked for"}
	}
	if d.Faults.CallError != nil {
		return nil, d.Faults.CallError
	}
	lost := 0
	if d.Faults.LossSource != nil {
		lost = d.Faults.LossSource.IntN(4)
	}
	if lost == 1 {
		return nil, errors.New("the node was not reached")
	}
	answer, err := d.handleMethod(node, method, request)
	if lost == 2 || d.Faults.LoseResponses ||
		d.Faults.LoseGroupResponses && strings.HasSuffix(method, "/CreateVolumeGroupSnapshot") {
		return nil, errors.New("the tunnel broke")
	}
	if err != nil {
		return nil, err
	}
	return proto.Marshal(answer)
}

func (d *Drivers) handleMethod(node, method string, request []byte) (proto.Message, error) {
	used := int64(0)
	for _, v := range d.Volumes {
		if v.Node == node {
			used += v.Size
		}
	}
	left := d.Capacity - used
	if d.Faults.FullNodes[node] {
		left = 0
	}
	if err := d.checkSecrets(method, request); err != nil {
		return nil, err
	}
	switch method[strings.LastIndex(method, "/")+1:] {
	case "CreateVolume":
		q := &csi.CreateVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		size := q.CapacityRange.RequiredBytes
		v := d.Volumes[q.Name]
		source, err := d.findSource(node, q)
		if v == nil && err != nil {
			return nil, err
		}
		switch {
		case v == nil && d.Faults.RefusedMountOption != "" &&
			slices.Contains(q.VolumeCapabilities[0].GetMount().GetMountFlags(), d.Faults.RefusedMountOption):
			return nil, status.Errorf(codes.InvalidArgument, "mount option %q is none", d.Faults.RefusedMountOption)
		case v != nil && v.Node != node:
			return nil, status.Errorf(codes.Internal, "volume %s is made a second time, on node %s as well as on %s",
				q.Name, node, v.Node)
		case q.AccessibilityRequirements.GetRequisite()[0].Segments[NodeSegment] != node:
			return nil, status.Errorf(codes.ResourceExhausted, "node %s is not where the volume is wanted", node)
		case v == nil && size > left:
			return nil, status.Errorf(codes.ResourceExhausted, "node %s is full", node)
		case v == nil:
			d.Volumes[q.Name] = &StoredVolume{Node: node, Size: size, Source: source,
				Attribute: q.MutableParameters["kind"]}
		}
		return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: q.Name, CapacityBytes: d.Volumes[q.Name].Size,
			AccessibleTopology: []*csi.Topology{{Segments: map[string]string{NodeSegment: node}}}}}, nil
	case "DeleteVolume":
		q := &csi.DeleteVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		if v := d.Volumes[q.VolumeId]; v != nil && v.Node == node {
			delete(d.Volumes, q.VolumeId)
		}
		return &csi.DeleteVolumeResponse{}, nil
	case "ControllerExpandVolume":
		q := &csi.ControllerExpandVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		v := d.Volumes[q.VolumeId]
		if v == nil { // created manually
			v = &StoredVolume{Node: node}
			d.Volumes[q.VolumeId] = v
		}
		if q.CapacityRange.RequiredBytes > 1<<50 {
			return nil, status.Error(codes.OutOfRange, "there is no such disk")
		}
		v.Size = max(v.Size, q.CapacityRange.RequiredBytes)
		return &csi.ControllerExpandVolumeResponse{CapacityBytes: v.Size,
			NodeExpansionRequired: d.Faults.NodeExpandError != nil}, nil
	case "NodeExpandVolume":
		q := &csi.NodeExpandVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		if v := d.Volumes[q.VolumeId]; v == nil || v.Size < q.CapacityRange.RequiredBytes {
			return nil, status.Errorf(codes.Internal, "volume %s is grown on node %s before it is larger",
				q.VolumeId, node)
		}
		if !errors.Is(d.Faults.NodeExpandError, ErrGrows) {
			return nil, d.Faults.NodeExpandError
		}
		d.Volumes[q.VolumeId].Node = node
		return &csi.NodeExpandVolumeResponse{}, nil
	case "ControllerGetCapabilities", "ControllerModifyVolume":
		return d.handleAttributes(node, method, request)
	case "CreateSnapshot", "DeleteSnapshot", "ListSnapshots":
		return d.handleSnapshot(node, method, request)
	case "GroupControllerGetCapabilities", "CreateVolumeGroupSnapshot", "DeleteVolumeGroupSnapshot",
		"GetVolumeGroupSnapshot":
		return d.handleGroup(node, method, request)
	case "GetCapacity":
		q := &csi.GetCapacityRequest{}
		if err := proto.Unmarshal(request, q); err != nil || len(q.Parameters) > 0 && d.Faults.CapacityError != nil {
			return nil, cmp.Or(err, d.Faults.CapacityError)
		}
		return &csi.GetCapacityResponse{AvailableCapacity: max(0, left)}, nil
	}
	return nil, status.Error(codes.Unimplemented, method)
}

// handleAttributes handles ControllerGetCapabilities and ControllerModifyVolume.
func (d *Drivers) handleAttributes(node, method string, request []byte) (proto.Message, error) {
	if strings.HasSuffix(method, "/ControllerGetCapabilities") {
		out, can := &csi.ControllerGetCapabilitiesResponse{},
			[]csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME}
		if !d.NoModify {
			can = append(can, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME)
		}
		for _, one := range can {
			out.Capabilities = append(out.Capabilities,
				&csi.ControllerServiceCapability{
					Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: one}}})
		}
		return out, nil
	}
	q := &csi.ControllerModifyVolumeRequest{}
	if err := proto.Unmarshal(request, q); err != nil {
		return nil, err
	}
	d.ModifyCalls++
	v := d.Volumes[q.VolumeId]
	switch {
	case v == nil || v.Node != node:
		return nil, status.Errorf(codes.NotFound, "volume %s is not on node %s", q.VolumeId, node)
	case q.MutableParameters["kind"] == "impossible":
		return nil, status.Error(codes.InvalidArgument, "there is no such kind")
	case d.Faults.ModifyError != nil:
		return nil, d.Faults.ModifyError
	}
	v.Attribute = q.MutableParameters["kind"]
	return &csi.ControllerModifyVolumeResponse{}, nil
}

// findSource returns the name of the snapshot or volume that request q names as its source, or "".
// It returns an error if the source is not on node.
func (d *Drivers) findSource(node string, q *csi.CreateVolumeRequest) (string, error) {
	from, all := q.GetVolumeContentSource().GetSnapshot().GetSnapshotId(), d.Snapshots
	if id := q.GetVolumeContentSource().GetVolume().GetVolumeId(); id != "" {
		from, all = id, d.Volumes
	}
	if from == "" {
		return "", nil
	}
	if d.Faults.CloneError != nil {
		return "", d.Faults.CloneError
	}
	if s := all[from]; s == nil || s.Node != node {
		return "", status.Errorf(codes.NotFound, "%s is not on node %s", from, node)
	}
	return from, nil
}

func (d *Drivers) handleSnapshot(node, method string, request []byte) (proto.Message, error) {
	answer := func(id string, s *StoredVolume) *csi.Snapshot {
		return &csi.Snapshot{SnapshotId: id, SourceVolumeId: s.Source, SizeBytes: s.Size,
			CreationTime: timestamppb.New(time.Unix(1e9, 0)), ReadyToUse: s.CallsLeft == 0, GroupSnapshotId: s.Group}
	}
	switch method[strings.LastIndex(method, "/")+1:] {
	case "CreateSnapshot":
		q := &csi.CreateSnapshotRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.SnapshotSecrets = q.Secrets
		v, s := d.Volumes[q.SourceVolumeId], d.Snapshots[q.Name]
		if s == nil && (v == nil || v.Node != node) {
			return nil, status.Errorf(codes.NotFound, "volume %s is not on node %s", q.SourceVolumeId, node)
		}
		if s == nil {
			s = &StoredVolume{Node: node, Size: v.Size, Source: q.SourceVolumeId, CallsLeft: d.SnapshotDelay}
			d.Snapshots[q.Name] = s
		} else if s.CallsLeft > 0 {
			s.CallsLeft--
		}
		return &csi.CreateSnapshotResponse{Snapshot: answer(q.Name, s)}, nil
	case "DeleteSnapshot":
		q := &csi.DeleteSnapshotRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		if s := d.Snapshots[q.SnapshotId]; s != nil && s.Node == node {
			if s.Group != "" {
				return nil, status.Errorf(codes.InvalidArgument, "snapshot %s is one of group %s",
					q.SnapshotId, s.Group)
			}
			delete(d.Snapshots, q.SnapshotId)
		}
		return &csi.DeleteSnapshotResponse{}, nil
	}
	q, res := &csi.ListSnapshotsRequest{}, &csi.ListSnapshotsResponse{}
	if err := proto.Unmarshal(request, q); err != nil {
		return nil, err
	}
	if s := d.Snapshots[q.SnapshotId]; s != nil && s.Node == node {
		res.Entries = append(res.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: answer(q.SnapshotId, s)})
	}
	return res, nil
}

// AddDriver registers OwnDriver on the nodes: it creates the CSIDriver and the CSINodes, and labels
// the Nodes with their topology.
func (w *Cluster) AddDriver(nodes ...string) {
	w.T.Helper()
	yes := true
	w.CreateObject(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: OwnDriver,
		Annotations: map[string]string{"keelson.dev/served-by": "agent"}},
		Spec: storagev1.CSIDriverSpec{StorageCapacity: &yes, AttachRequired: new(bool)}})
	for _, n := range nodes {
		w.Eventually("label of "+n, func() error {
			node, err := client.Get[*corev1.Node](w.Ctx, w.Admin, "", n)
			if err != nil {
				return err
			}
			next := node.DeepCopy()
			metav1.SetMetaDataLabel(&next.ObjectMeta, NodeSegment, n)
			_, err = client.Update(w.Ctx, w.Admin, next)
			return err
		})
		w.CreateObject(&storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: n}, Spec: storagev1.CSINodeSpec{
			Drivers: []storagev1.CSINodeDriver{{Name: OwnDriver, NodeID: n, TopologyKeys: []string{NodeSegment}}}}})
	}
}

// CreateClass creates a StorageClass of OwnDriver that allows volume expansion.
func (w *Cluster) CreateClass(
	name string, mode storagev1.VolumeBindingMode, reclaim corev1.PersistentVolumeReclaimPolicy,
) {
	w.T.Helper()
	yes := true
	w.CreateObject(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: OwnDriver,
		VolumeBindingMode: &mode,
		ReclaimPolicy:     &reclaim, AllowVolumeExpansion: &yes})
}

// NewClassClaim returns a claim of a StorageClass.
func NewClassClaim(name, class, size string) *corev1.PersistentVolumeClaim {
	c := NewClaim(name, size)
	c.Spec.StorageClassName = &class
	return c
}

// SelectNode sets the annotation by which the scheduler selects a node for a claim.
func (w *Cluster) SelectNode(name, node string) {
	w.T.Helper()
	Update(w, name, func(c *corev1.PersistentVolumeClaim) {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, "volume.kubernetes.io/selected-node", node)
	})
}

// CheckNoVolumes returns an error if a PersistentVolume exists or OwnDriver stores a volume.
func (w *Cluster) CheckNoVolumes() error {
	list, err := client.List[*corev1.PersistentVolume](w.Ctx, w.Admin, "", metav1.ListOptions{})
	if err != nil {
		return err
	}
	if len(list) > 0 || w.Drivers.CountVolumes() > 0 {
		return fmt.Errorf("%d objects, %d volumes", len(list), w.Drivers.CountVolumes())
	}
	return nil
}

// handleGroup implements the GroupController service of OwnDriver on a node. A group snapshot is
// the set of its snapshots.
func (d *Drivers) handleGroup(node, method string, request []byte) (proto.Message, error) {
	answer := func(id string) *csi.VolumeGroupSnapshot {
		g := &csi.VolumeGroupSnapshot{GroupSnapshotId: id, CreationTime: timestamppb.New(time.Unix(1e9, 0)),
			ReadyToUse: true}
		for name, s := range d.Snapshots {
			if s.Group == id && s.Node == node {
				g.ReadyToUse = g.ReadyToUse && s.CallsLeft == 0
				g.Snapshots = append(g.Snapshots, &csi.Snapshot{SnapshotId: name, SourceVolumeId: s.Source,
					SizeBytes:    s.Size,
					CreationTime: g.CreationTime, ReadyToUse: s.CallsLeft == 0, GroupSnapshotId: id})
			}
		}
		slices.SortFunc(g.Snapshots, func(a, b *csi.Snapshot) int {
			return strings.Compare(a.SnapshotId, b.SnapshotId)
		})
		return g
	}
	switch method[strings.LastIndex(method, "/")+1:] {
	case "GroupControllerGetCapabilities":
		if d.NoGroups {
			return nil, status.Error(codes.Unimplemented, "unknown service")
		}
		const can = csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT
		return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{
			{Type: &csi.GroupControllerServiceCapability_Rpc{
				Rpc: &csi.GroupControllerServiceCapability_RPC{Type: can}}}}}, nil
	case "CreateVolumeGroupSnapshot":
		q := &csi.CreateVolumeGroupSnapshotRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.SnapshotSecrets = q.Secrets
		for _, id := range q.SourceVolumeIds {
			if v := d.Volumes[id]; v == nil || v.Node != node {
				return nil, status.Errorf(codes.NotFound, "volume %s is not on node %s", id, node)
			}
		}
		for _, id := range q.SourceVolumeIds {
			if s := d.Snapshots[q.Name+"/"+id]; s == nil {
				d.Snapshots[q.Name+"/"+id] = &StoredVolume{Node: node, Size: d.Volumes[id].Size, Source: id,
					CallsLeft: d.SnapshotDelay, Group: q.Name}
			} else if s.CallsLeft > 0 {
				s.CallsLeft--
			}
		}
		return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: answer(q.Name)}, nil
	case "DeleteVolumeGroupSnapshot":
		q := &csi.DeleteVolumeGroupSnapshotRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		for name, s := range d.Snapshots {
			if s.Group == q.GroupSnapshotId && s.Node == node {
				delete(d.Snapshots, name)
			}
		}
		return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
	}
	q := &csi.GetVolumeGroupSnapshotRequest{}
	if err := proto.Unmarshal(request, q); err != nil {
		return nil, err
	}
	if g := answer(q.GroupSnapshotId); len(g.Snapshots) > 0 {
		return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: g}, nil
	}
	return nil, status.Errorf(codes.NotFound, "group %s is not on node %s", q.GroupSnapshotId, node)
}

// checkSecrets returns an error if Secrets requires a Secret for the method and request has
// another.
func (d *Drivers) checkSecrets(method string, request []byte) error {
	call := method[strings.LastIndex(method, "/")+1:]
	want, ok := d.Secrets[call]
	if !ok {
		return nil
	}
	q, ok := map[string]interface {
		proto.Message
		GetSecrets() map[string]string
	}{"CreateVolume": &csi.CreateVolumeRequest{}, "DeleteVolume": &csi.DeleteVolumeRequest{},
		"ControllerExpandVolume": &csi.ControllerExpandVolumeRequest{},
		"ControllerModifyVolume": &csi.ControllerModifyVolumeRequest{}}[call]
	if !ok {
		return status.Errorf(codes.Internal, "%s has no lock", call)
	}
	if err := proto.Unmarshal(request, q); err != nil {
		return err
	}
	if got := q.GetSecrets()["key"]; got != want {
		return status.Errorf(codes.Unauthenticated, "%s with key %q", call, got)
	}
	return nil
}
