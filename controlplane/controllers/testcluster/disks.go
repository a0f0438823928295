package testcluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/internal/virtual"
)

const DiskDriver = "disk.example"

// Disks simulates the CSI driver DiskDriver and the agents that mount its volumes. A volume of
// DiskDriver must be attached to one node at a time. Volumes are identified by their handles.
type Disks struct {
	Mu          sync.Mutex
	Created     map[string]bool              // volumes that CreateVolume has created
	PublishedAt map[string]string            // node ID to which each volume is published
	Mounted     map[string]map[string]bool   // nodes that have each volume mounted
	Dead        map[string]bool              // nodes without power
	Violations  []string                     // violations of the driver's rules, such as a volume mounted on two nodes
	Flaky       *rand.Rand                   // source of lost calls, before or after they are performed; nil loses none
	Hook        func(method string) error    // called after each performed call; its error becomes the call's result
	Secrets     map[string]map[string]string // Secret of the last call of each method
	Unmounts    bool                         // nodes unmount volumes that no pod needs
	ISCSI       bool                         // volumes are iSCSI disks, which need no driver call
	Handles     map[string]string            // handle of each PersistentVolume
	Reports     bool                         // nodes report which volumes they have mounted
}

// VolumeName returns the name of the volume with this handle in status.volumesAttached of a Node.
func (d *Disks) VolumeName(volume string) corev1.UniqueVolumeName {
	if d.ISCSI {
		return corev1.UniqueVolumeName("kubernetes.io/iscsi/iqn.2026-01.example:" + volume + ":3")
	}
	return api.AttachedVolumeName(DiskDriver, volume)
}

// HandleOf returns the handle of PersistentVolume v, which is v if Handles lacks it.
func (d *Disks) HandleOf(v string) string {
	return cmp.Or(d.Handles[v], v)
}

// Change calls f with the lock held.
func (d *Disks) Change(f func()) {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	f()
}

// Complain adds a message to Violations. The caller holds Mu.
func (d *Disks) Complain(format string, args ...any) {
	d.Violations = append(d.Violations, fmt.Sprintf(format, args...))
}

func (d *Disks) callDriver(node, method string, request []byte) ([]byte, error) {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	if d.Dead[node] {
		return nil, errors.New("node " + node + " has no power")
	}
	lost := 0
	if d.Flaky != nil {
		lost = d.Flaky.IntN(4)
	}
	if lost == 1 {
		return nil, errors.New("the node was not reached")
	}
	method = method[strings.LastIndex(method, "/")+1:]
	answer, err := d.handleMethod(method, request)
	if err == nil && d.Hook != nil {
		err = d.Hook("call " + method)
	}
	if lost == 2 {
		err = errors.New("the tunnel broke")
	}
	if err != nil {
		return nil, err
	}
	return proto.Marshal(answer)
}

func (d *Disks) handleMethod(method string, request []byte) (proto.Message, error) {
	switch method {
	case "ControllerGetCapabilities":
		can := func(t csi.ControllerServiceCapability_RPC_Type) *csi.ControllerServiceCapability {
			return &csi.ControllerServiceCapability{
				Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}}}
		}
		return &csi.ControllerGetCapabilitiesResponse{
			Capabilities: []*csi.ControllerServiceCapability{
				can(csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME)}}, nil
	case "ControllerPublishVolume":
		q := &csi.ControllerPublishVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.Secrets[method] = q.Secrets
		if at := d.PublishedAt[q.VolumeId]; at != "" && at != q.NodeId {
			d.Complain("volume %s is asked for by %s while %s has it", q.VolumeId, q.NodeId, at)
			return nil, status.Errorf(codes.FailedPrecondition, "%s has it", at)
		}
		d.PublishedAt[q.VolumeId] = q.NodeId
		return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{"device": "/dev/" + q.VolumeId}},
			nil
	case "ControllerUnpublishVolume":
		q := &csi.ControllerUnpublishVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.Secrets[method] = q.Secrets
		node := strings.TrimPrefix(q.NodeId, "id-")
		if d.Mounted[q.VolumeId][node] {
			d.Complain("volume %s is taken from %s, which has it mounted", q.VolumeId, node)
		}
		if d.PublishedAt[q.VolumeId] == q.NodeId {
			delete(d.PublishedAt, q.VolumeId)
		}
		return &csi.ControllerUnpublishVolumeResponse{}, nil
	case "CreateVolume":
		q := &csi.CreateVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.Created[q.Name] = true
		return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: q.Name,
			CapacityBytes: q.CapacityRange.RequiredBytes}}, nil
	case "DeleteVolume":
		q := &csi.DeleteVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		if at := d.PublishedAt[q.VolumeId]; at != "" {
			d.Complain("volume %s is deleted while %s has it", q.VolumeId, at)
		}
		delete(d.Created, q.VolumeId)
		return &csi.DeleteVolumeResponse{}, nil
	}
	return nil, status.Error(codes.Unimplemented, method)
}

// SetPower cuts the power of a node if powered is false, and restores it otherwise. Both unmount
// all volumes of the node, and set its condition Ready accordingly.
func SetPower(w *Cluster, node string, powered bool) {
	w.T.Helper()
	w.Nodes.Mark(w.Nodes.Dead, node, !powered)
	d := w.Drivers.Disks
	d.Change(func() {
		d.Dead[node] = !powered
		for _, m := range d.Mounted {
			delete(m, node)
		}
	})
	state := corev1.ConditionTrue
	if !powered {
		state = corev1.ConditionUnknown
	}
	w.SetNodeReady(node, state)
}

// AddDisks adds the CSI driver DiskDriver, which requires attachment of its volumes, to w and its
// nodes. For each node it runs a fake agent that mounts the volumes, until the test ends. The
// result is the state of the driver and of the mounts.
func AddDisks(w *Cluster, nodes ...string) *Disks {
	w.T.Helper()
	d := &Disks{Created: map[string]bool{}, PublishedAt: map[string]string{}, Mounted: map[string]map[string]bool{},
		Dead: map[string]bool{}, Secrets: map[string]map[string]string{},
		Unmounts: true, Reports: true, Handles: map[string]string{}}
	w.Drivers.Change(func() { w.Drivers.Disks = d })
	w.CreateObject(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: DiskDriver,
		Annotations: map[string]string{engine.ServedByAnnotation: engine.ServedByAgent}}})
	for _, n := range nodes {
		Update(w, n, func(n *corev1.Node) {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, api.AnnotationFencesAfter, "20")
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, api.AnnotationVolumesInUse, "told")
		})
		w.CreateObject(&storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: n},
			Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: DiskDriver, NodeID: "id-" + n}}}})
	}
	ctx, cancel := context.WithCancel(w.Ctx)
	var running sync.WaitGroup
	for _, n := range nodes {
		running.Go(func() {
			for ctx.Err() == nil {
				w.runMounter(ctx, d, n)
				time.Sleep(250 * time.Millisecond) // of virtual time
			}
		})
	}
	w.T.Cleanup(func() { cancel(); running.Wait() })
	return d
}

// runMounter performs one step of the agent of a node. It adds the volumes of the node's pods to
// status.volumesInUse, mounts those that are attached, and unmounts those that no pod needs. A
// volume stays in status.volumesInUse until it is unmounted.
func (w *Cluster) runMounter(ctx context.Context, d *Disks, node string) {
	d.Mu.Lock()
	dead := d.Dead[node]
	d.Mu.Unlock()
	n, err := client.Get[*corev1.Node](ctx, w.Admin, "", node)
	if err != nil || dead {
		return
	}
	if c := api.NodeCondition(n, corev1.NodeReady); c == nil || c.Status != corev1.ConditionTrue {
		return
	}
	wanted := map[string]bool{} // PersistentVolumes
	for _, p := range w.LivePods() {
		for _, v := range p.Spec.Volumes {
			if v.PersistentVolumeClaim == nil || p.Spec.NodeName != node || api.IsPodTerminal(p) {
				continue
			}
			c, err := client.Get[*corev1.PersistentVolumeClaim](ctx, w.Admin, "default",
				v.PersistentVolumeClaim.ClaimName)
			if err == nil && c.Spec.VolumeName != "" {
				wanted[c.Spec.VolumeName] = true
			}
		}
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	needed := map[string]bool{}
	for v := range wanted {
		needed[d.HandleOf(v)] = true
	}
	if d.Dead[node] {
		return
	}
	inUse := []corev1.UniqueVolumeName{}
	for h := range needed {
		name := d.VolumeName(h)
		inUse = append(inUse, name)
		has := slices.ContainsFunc(n.Status.VolumesAttached, func(v corev1.AttachedVolume) bool {
			return v.Name == name
		})
		if has && slices.Contains(n.Status.VolumesInUse, name) && !d.Mounted[h][node] {
			d.mountVolume(h, node)
		}
	}
	for h, m := range d.Mounted {
		if m[node] && !needed[h] {
			if d.Unmounts {
				delete(m, node)
			}
			inUse = append(inUse, d.VolumeName(h)) // until the next step
		}
	}
	slices.Sort(inUse)
	d.reportVolumes(ctx, w, n)
	if inUse = slices.Compact(inUse); !slices.Equal(inUse, n.Status.VolumesInUse) {
		next := n.DeepCopy()
		next.Status.VolumesInUse = inUse
		_, _ = client.UpdateStatus(ctx, w.Admin, next) // the next step retries
	}
}

// reportVolumes writes the volumes that node n has mounted to annotation api.AnnotationVolumesHeld,
// unless Reports is false.
func (d *Disks) reportVolumes(ctx context.Context, w *Cluster, n *corev1.Node) {
	if !d.Reports {
		return
	}
	held := []corev1.UniqueVolumeName{}
	for h, m := range d.Mounted {
		if m[n.Name] {
			held = append(held, d.VolumeName(h))
		}
	}
	slices.Sort(held)
	said, err := json.Marshal(held)
	if err != nil || n.Annotations[api.AnnotationVolumesHeld] == string(said) {
		return
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]string{api.AnnotationVolumesHeld: string(said)}}})
	if err == nil {
		// the next step retries
		_, _ = client.Patch[*corev1.Node](ctx, w.Admin, "", n.Name, "", types.MergePatchType, patch)
	}
}

func (d *Disks) mountVolume(h, node string) {
	if !d.ISCSI && d.PublishedAt[h] != "id-"+node {
		d.Complain("volume %s is mounted on %s, and published to %q", h, node, d.PublishedAt[h])
	}
	if d.Mounted[h] == nil {
		d.Mounted[h] = map[string]bool{}
	}
	d.Mounted[h][node] = true
	if len(d.Mounted[h]) > 1 {
		d.Complain("volume %s is mounted on %v", h, slices.Sorted(maps.Keys(d.Mounted[h])))
	}
}

// AwaitEventContaining waits for an Event with this reason and a message that contains words.
func (w *Cluster) AwaitEventContaining(reason, words string) {
	w.T.Helper()
	w.Eventually("event "+reason+" "+words, func() error {
		list, err := client.List[*corev1.Event](w.Ctx, w.Admin, "", metav1.ListOptions{})
		if err != nil {
			return err
		}
		var seen []string
		for _, e := range list {
			if e.Reason == reason && strings.Contains(e.Message, words) {
				return nil
			}
			seen = append(seen, e.Reason+": "+e.Message)
		}
		return errors.New(strings.Join(seen, "\n"))
	})
}

// CreateDisk creates PersistentVolume name of DiskDriver. Its handle is its name.
func CreateDisk(w *Cluster, name string) {
	w.T.Helper()
	CreateDiskOf(w, name, name, "192.0.2.1")
}

// CreateDiskOf creates PersistentVolume name of DiskDriver for the volume with this handle. If
// Disks.ISCSI is set, it creates an iSCSI volume of a target with these portals.
func CreateDiskOf(w *Cluster, name, handle string, portals ...string) {
	w.T.Helper()
	w.Drivers.Disks.Change(func() { w.Drivers.Disks.Handles[name] = handle })
	v := NewVolume(name, "1Gi")
	v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{
		CSI: &corev1.CSIPersistentVolumeSource{Driver: DiskDriver, VolumeHandle: handle,
			ControllerPublishSecretRef: &corev1.SecretReference{Namespace: "default", Name: "key"}}}
	if w.Drivers.Disks.ISCSI {
		target := "iqn.2026-01.example:" + handle
		if name != handle { // names of targets are the same in capitals
			target = "iqn.2026-01.Example:" + strings.ToUpper(handle)
		}
		v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{
			ISCSI: &corev1.ISCSIPersistentVolumeSource{TargetPortal: portals[0], Portals: portals[1:],
				IQN: target, Lun: 3}}
	}
	w.CreateObject(v)
}

// NewClaimPod returns a pod that is bound to node and uses the claim.
func NewClaimPod(name, node, claim string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.PodSpec{NodeName: node,
			Containers: []corev1.Container{{Name: "c", Image: "i"}},
			Volumes: []corev1.Volume{{Name: "v",
				VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
					ClaimName: claim}}}}}}
}

// AwaitMounted waits until the volume with this handle is attached to and mounted on node, and on
// no other node. If node is "", it waits until the volume is neither mounted nor attached.
func AwaitMounted(w *Cluster, within time.Duration, handle, node string) {
	w.T.Helper()
	d := w.Drivers.Disks
	w.EventuallyWithin(within, "volume "+handle+" on "+node, func() error {
		list, err := client.List[*storagev1.VolumeAttachment](w.Ctx, w.Admin, "", metav1.ListOptions{})
		if err != nil {
			return err
		}
		d.Mu.Lock()
		defer d.Mu.Unlock()
		list = slices.DeleteFunc(list, func(a *storagev1.VolumeAttachment) bool {
			return d.HandleOf(*a.Spec.Source.PersistentVolumeName) != handle
		})
		on := slices.Collect(maps.Keys(d.Mounted[handle]))
		switch {
		case node == "" && (len(on) > 0 || d.PublishedAt[handle] != "" || len(list) > 0),
			node != "" && (len(on) != 1 || on[0] != node || len(list) != 1):
			return fmt.Errorf("mounted on %v, published to %q, %d attachments", on, d.PublishedAt[handle], len(list))
		}
		return nil
	})
}

// CheckDisks fails the test if the driver has recorded violations.
func CheckDisks(w *Cluster) {
	w.T.Helper()
	d := w.Drivers.Disks
	d.Mu.Lock()
	defer d.Mu.Unlock()
	for _, s := range d.Violations {
		w.T.Error(s)
	}
}

// RunAttached calls f with a Cluster, in virtual time. node is the node on which pod db-0 of a
// StatefulSet uses a volume of d.
func RunAttached(t *testing.T, o Options, f func(w *Cluster, d *Disks, node string)) {
	t.Helper()
	RunAttachedOf(t, o, false, f)
}

// RunAttachedOf does the same as RunAttached for a volume of DiskDriver or, if iscsi is true, for
// an iSCSI volume.
func RunAttachedOf(t *testing.T, o Options, iscsi bool, f func(w *Cluster, d *Disks, node string)) {
	t.Helper()
	virtual.Test(t, func(t *testing.T) {
		o.Engine, o.NoMutationGuard = engine.Options{OwnIdentity: true, Resync: time.Minute}, true
		w := StartCluster(t, o)
		w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "key"},
			Data: map[string][]byte{"k": []byte("s3cret")}})
		d := AddDisks(w, "w1", "w2", "w3")
		d.Change(func() { d.ISCSI = iscsi })
		CreateDisk(w, "v")
		w.CreateObject(NewStatefulSet("db", 1, "db:1"))
		w.AwaitStatefulSet("db", 1)
		node := w.LivePods()[0].Spec.NodeName
		w.Eventually("the claim is a volume of the pod", func() error { return w.CheckUsesClaim("db-0", "data-db-0") })
		AwaitMounted(w, 30*time.Second, "v", node)
		f(w, d, node)
		CheckDisks(w)
	})
}
