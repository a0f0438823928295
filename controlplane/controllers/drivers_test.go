package controllers_test

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
	ownDriver   = "local.csi.keelson.dev"
	nodeSegment = "topology." + ownDriver + "/node"
)

// drivers simulates the drivers of all nodes: each node holds its own volumes, as with the included
// driver.
type drivers struct {
	mu        sync.Mutex
	volumes   map[string]*onDisk // by name
	snaps     map[string]*onDisk // snapshots, by name
	slow      int                // calls until a snapshot is ready
	told      map[string]string  // secrets that came with the last CreateSnapshot
	room      int64              // of each node
	full      map[string]bool    // nodes without room
	err       error              // of every call
	mute      bool               // calls are performed, and their responses lost
	flaky     *rand.Rand         // loses calls before or after they are performed; nil loses none
	onNodes   error              // volumes have to grow on nodes as well, which answer so; nil = no
	disks     *disks             // of the driver that attaches; nil: it is nowhere
	modify    error              // the answer to ControllerModifyVolume; nil: it is done
	rigid     bool               // the driver cannot modify volumes
	copies    error              // the response to clone requests; nil creates the clone
	asked     int                // calls of ControllerModifyVolume
	single    bool               // the driver takes no groups of snapshots
	muteTakes bool               // the responses to group snapshot requests are lost
	never     error              // the response to GetCapacity; nil returns some capacity
	unmounted string             // a mount option that the driver refuses
	keys      map[string]string  // the secrets that calls must have
	calls     int                // number of performed calls
}

// errGrows is the answer of a node that does grow a volume.
var errGrows = errors.New("it grows")

type onDisk struct {
	node string
	size int64
	of   string // its source
	left int    // calls until it is ready
	kind string // the attribute that the volume has
	in   string // the group of snapshots that it is one of
}

func (d *drivers) get(name string) *onDisk {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.volumes[name]
}

func (d *drivers) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.volumes)
}

func (d *drivers) set(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

// CallDriver implements api.NodeDrivers.
func (d *drivers) CallDriver(ctx context.Context, node, driver, method string, request []byte, confirm func(context.Context) error) ([]byte, error) {
	if err := confirm(ctx); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls++
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if driver == diskDriver && d.disks != nil {
		return d.disks.call(node, method, request)
	}
	if driver != ownDriver {
		return nil, &api.DriverMissing{Node: node, Message: driver + " was looked for"}
	}
	if d.err != nil {
		return nil, d.err
	}
	lost := 0
	if d.flaky != nil {
		lost = d.flaky.IntN(4)
	}
	if lost == 1 {
		return nil, errors.New("the node was not reached")
	}
	answer, err := d.do(node, method, request)
	if lost == 2 || d.mute || d.muteTakes && strings.HasSuffix(method, "/CreateVolumeGroupSnapshot") {
		return nil, errors.New("the tunnel broke")
	}
	if err != nil {
		return nil, err
	}
	return proto.Marshal(answer)
}

func (d *drivers) do(node, method string, request []byte) (proto.Message, error) {
	used := int64(0)
	for _, v := range d.volumes {
		if v.node == node {
			used += v.size
		}
	}
	left := d.room - used
	if d.full[node] {
		left = 0
	}
	if err := d.locked(method, request); err != nil {
		return nil, err
	}
	switch method[strings.LastIndex(method, "/")+1:] {
	case "CreateVolume":
		q := &csi.CreateVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		size := q.CapacityRange.RequiredBytes
		v := d.volumes[q.Name]
		source, err := d.source(node, q)
		if v == nil && err != nil {
			return nil, err
		}
		switch {
		case v == nil && d.unmounted != "" && slices.Contains(q.VolumeCapabilities[0].GetMount().GetMountFlags(), d.unmounted):
			return nil, status.Errorf(codes.InvalidArgument, "mount option %q is none", d.unmounted)
		case v != nil && v.node != node:
			return nil, status.Errorf(codes.Internal, "volume %s is made a second time, on node %s as well as on %s", q.Name, node, v.node)
		case q.AccessibilityRequirements.GetRequisite()[0].Segments[nodeSegment] != node:
			return nil, status.Errorf(codes.ResourceExhausted, "node %s is not where the volume is wanted", node)
		case v == nil && size > left:
			return nil, status.Errorf(codes.ResourceExhausted, "node %s is full", node)
		case v == nil:
			d.volumes[q.Name] = &onDisk{node: node, size: size, of: source, kind: q.MutableParameters["kind"]}
		}
		return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: q.Name, CapacityBytes: d.volumes[q.Name].size,
			AccessibleTopology: []*csi.Topology{{Segments: map[string]string{nodeSegment: node}}}}}, nil
	case "DeleteVolume":
		q := &csi.DeleteVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		if v := d.volumes[q.VolumeId]; v != nil && v.node == node {
			delete(d.volumes, q.VolumeId)
		}
		return &csi.DeleteVolumeResponse{}, nil
	case "ControllerExpandVolume":
		q := &csi.ControllerExpandVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		v := d.volumes[q.VolumeId]
		if v == nil { // created manually
			v = &onDisk{node: node}
			d.volumes[q.VolumeId] = v
		}
		if q.CapacityRange.RequiredBytes > 1<<50 {
			return nil, status.Error(codes.OutOfRange, "there is no such disk")
		}
		v.size = max(v.size, q.CapacityRange.RequiredBytes)
		return &csi.ControllerExpandVolumeResponse{CapacityBytes: v.size, NodeExpansionRequired: d.onNodes != nil}, nil
	case "NodeExpandVolume":
		q := &csi.NodeExpandVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		if v := d.volumes[q.VolumeId]; v == nil || v.size < q.CapacityRange.RequiredBytes {
			return nil, status.Errorf(codes.Internal, "volume %s is grown on node %s before it is larger", q.VolumeId, node)
		}
		if !errors.Is(d.onNodes, errGrows) {
			return nil, d.onNodes
		}
		d.volumes[q.VolumeId].node = node
		return &csi.NodeExpandVolumeResponse{}, nil
	case "ControllerGetCapabilities", "ControllerModifyVolume":
		return d.attributes(node, method, request)
	case "CreateSnapshot", "DeleteSnapshot", "ListSnapshots":
		return d.snapshot(node, method, request)
	case "GroupControllerGetCapabilities", "CreateVolumeGroupSnapshot", "DeleteVolumeGroupSnapshot", "GetVolumeGroupSnapshot":
		return d.group(node, method, request)
	case "GetCapacity":
		q := &csi.GetCapacityRequest{}
		if err := proto.Unmarshal(request, q); err != nil || len(q.Parameters) > 0 && d.never != nil {
			return nil, cmp.Or(err, d.never)
		}
		return &csi.GetCapacityResponse{AvailableCapacity: max(0, left)}, nil
	}
	return nil, status.Error(codes.Unimplemented, method)
}

// attributes handles the Controller calls that concern volume attributes.
func (d *drivers) attributes(node, method string, request []byte) (proto.Message, error) {
	if strings.HasSuffix(method, "/ControllerGetCapabilities") {
		out, can := &csi.ControllerGetCapabilitiesResponse{}, []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME}
		if !d.rigid {
			can = append(can, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME)
		}
		for _, one := range can {
			out.Capabilities = append(out.Capabilities, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: one}}})
		}
		return out, nil
	}
	q := &csi.ControllerModifyVolumeRequest{}
	if err := proto.Unmarshal(request, q); err != nil {
		return nil, err
	}
	d.asked++
	v := d.volumes[q.VolumeId]
	switch {
	case v == nil || v.node != node:
		return nil, status.Errorf(codes.NotFound, "volume %s is not on node %s", q.VolumeId, node)
	case q.MutableParameters["kind"] == "impossible":
		return nil, status.Error(codes.InvalidArgument, "there is no such kind")
	case d.modify != nil:
		return nil, d.modify
	}
	v.kind = q.MutableParameters["kind"]
	return &csi.ControllerModifyVolumeResponse{}, nil
}

// source returns the source of a volume, which must be on its node.
func (d *drivers) source(node string, q *csi.CreateVolumeRequest) (string, error) {
	from, all := q.GetVolumeContentSource().GetSnapshot().GetSnapshotId(), d.snaps
	if id := q.GetVolumeContentSource().GetVolume().GetVolumeId(); id != "" {
		from, all = id, d.volumes
	}
	if from == "" {
		return "", nil
	}
	if d.copies != nil {
		return "", d.copies
	}
	if s := all[from]; s == nil || s.node != node {
		return "", status.Errorf(codes.NotFound, "%s is not on node %s", from, node)
	}
	return from, nil
}

func (d *drivers) snapshot(node, method string, request []byte) (proto.Message, error) {
	answer := func(id string, s *onDisk) *csi.Snapshot {
		return &csi.Snapshot{SnapshotId: id, SourceVolumeId: s.of, SizeBytes: s.size, CreationTime: timestamppb.New(time.Unix(1e9, 0)), ReadyToUse: s.left == 0, GroupSnapshotId: s.in}
	}
	switch method[strings.LastIndex(method, "/")+1:] {
	case "CreateSnapshot":
		q := &csi.CreateSnapshotRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.told = q.Secrets
		v, s := d.volumes[q.SourceVolumeId], d.snaps[q.Name]
		if s == nil && (v == nil || v.node != node) {
			return nil, status.Errorf(codes.NotFound, "volume %s is not on node %s", q.SourceVolumeId, node)
		}
		if s == nil {
			s = &onDisk{node: node, size: v.size, of: q.SourceVolumeId, left: d.slow}
			d.snaps[q.Name] = s
		} else if s.left > 0 {
			s.left--
		}
		return &csi.CreateSnapshotResponse{Snapshot: answer(q.Name, s)}, nil
	case "DeleteSnapshot":
		q := &csi.DeleteSnapshotRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		if s := d.snaps[q.SnapshotId]; s != nil && s.node == node {
			if s.in != "" {
				return nil, status.Errorf(codes.InvalidArgument, "snapshot %s is one of group %s", q.SnapshotId, s.in)
			}
			delete(d.snaps, q.SnapshotId)
		}
		return &csi.DeleteSnapshotResponse{}, nil
	}
	q, res := &csi.ListSnapshotsRequest{}, &csi.ListSnapshotsResponse{}
	if err := proto.Unmarshal(request, q); err != nil {
		return nil, err
	}
	if s := d.snaps[q.SnapshotId]; s != nil && s.node == node {
		res.Entries = append(res.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: answer(q.SnapshotId, s)})
	}
	return res, nil
}

// driverOn has the driver that agents have registered on nodes, with the objects that every cluster has for it.
func (w *world) driverOn(nodes ...string) {
	w.t.Helper()
	yes := true
	w.create(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: ownDriver, Annotations: map[string]string{"keelson.dev/served-by": "agent"}},
		Spec: storagev1.CSIDriverSpec{StorageCapacity: &yes, AttachRequired: new(bool)}})
	for _, n := range nodes {
		w.eventually("label of "+n, func() error {
			node, err := client.Get[*corev1.Node](w.ctx, w.admin, "", n)
			if err != nil {
				return err
			}
			next := node.DeepCopy()
			metav1.SetMetaDataLabel(&next.ObjectMeta, nodeSegment, n)
			_, err = client.Update(w.ctx, w.admin, next)
			return err
		})
		w.create(&storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: n}, Spec: storagev1.CSINodeSpec{
			Drivers: []storagev1.CSINodeDriver{{Name: ownDriver, NodeID: n, TopologyKeys: []string{nodeSegment}}}}})
	}
}

// class creates a StorageClass of the driver that the agents serve.
func (w *world) class(name string, mode storagev1.VolumeBindingMode, reclaim corev1.PersistentVolumeReclaimPolicy) {
	w.t.Helper()
	yes := true
	w.create(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: ownDriver, VolumeBindingMode: &mode,
		ReclaimPolicy: &reclaim, AllowVolumeExpansion: &yes})
}

func classed(name, class, size string) *corev1.PersistentVolumeClaim {
	c := claim(name, size)
	c.Spec.StorageClassName = &class
	return c
}

// selected has the scheduler have chosen a node for a claim.
func (w *world) selected(name, node string) {
	w.t.Helper()
	update(w, name, func(c *corev1.PersistentVolumeClaim) {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, "volume.kubernetes.io/selected-node", node)
	})
}

// noVolumes is nil when there is no volume left, of objects and of the drivers.
func (w *world) noVolumes() error {
	list, err := client.List[*corev1.PersistentVolume](w.ctx, w.admin, "", metav1.ListOptions{})
	if err != nil {
		return err
	}
	if len(list) > 0 || w.drivers.count() > 0 {
		return fmt.Errorf("%d objects, %d volumes", len(list), w.drivers.count())
	}
	return nil
}
