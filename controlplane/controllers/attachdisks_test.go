package controllers_test

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
	"keelson.dev/keelson/controlplane/controllers"
)

const diskDriver = "disk.example"

// disks simulates a driver whose volumes are attached to one node each, and the nodes that mount
// them.
type disks struct {
	mu       sync.Mutex
	made     map[string]bool              // volumes that were created
	at       map[string]string            // where a volume is published, by handle
	mounted  map[string]map[string]bool   // nodes that have a volume mounted
	dead     map[string]bool              // nodes without power
	wrong    []string                     // violations
	flaky    *rand.Rand                   // loses calls before or after they are performed
	hook     func(method string) error    // called after a call was performed
	secrets  map[string]map[string]string // of each kind of call, as seen last
	unmounts bool                         // nodes unmount volumes that no pod needs
	iscsi    bool                         // volumes are iSCSI disks, which need no driver call
	shows    map[string]string            // handles, by PersistentVolume
	tells    bool                         // nodes report which volumes they have mounted
}

// name is how a Node's status names a volume.
func (d *disks) name(volume string) corev1.UniqueVolumeName {
	if d.iscsi {
		return corev1.UniqueVolumeName("kubernetes.io/iscsi/iqn.2026-01.example:" + volume + ":3")
	}
	return api.AttachedName(diskDriver, volume)
}

// handle returns the handle of a PersistentVolume. The default is its name.
func (d *disks) handle(v string) string {
	return cmp.Or(d.shows[v], v)
}

func (d *disks) set(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

func (d *disks) complain(format string, args ...any) {
	d.wrong = append(d.wrong, fmt.Sprintf(format, args...))
}

func (d *disks) call(node, method string, request []byte) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead[node] {
		return nil, errors.New("node " + node + " has no power")
	}
	lost := 0
	if d.flaky != nil {
		lost = d.flaky.IntN(4)
	}
	if lost == 1 {
		return nil, errors.New("the node was not reached")
	}
	method = method[strings.LastIndex(method, "/")+1:]
	answer, err := d.do(method, request)
	if err == nil && d.hook != nil {
		err = d.hook("call " + method)
	}
	if lost == 2 {
		err = errors.New("the tunnel broke")
	}
	if err != nil {
		return nil, err
	}
	return proto.Marshal(answer)
}

func (d *disks) do(method string, request []byte) (proto.Message, error) {
	switch method {
	case "ControllerGetCapabilities":
		can := func(t csi.ControllerServiceCapability_RPC_Type) *csi.ControllerServiceCapability {
			return &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}}}
		}
		return &csi.ControllerGetCapabilitiesResponse{Capabilities: []*csi.ControllerServiceCapability{can(csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME)}}, nil
	case "ControllerPublishVolume":
		q := &csi.ControllerPublishVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.secrets[method] = q.Secrets
		if at := d.at[q.VolumeId]; at != "" && at != q.NodeId {
			d.complain("volume %s is asked for by %s while %s has it", q.VolumeId, q.NodeId, at)
			return nil, status.Errorf(codes.FailedPrecondition, "%s has it", at)
		}
		d.at[q.VolumeId] = q.NodeId
		return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{"device": "/dev/" + q.VolumeId}}, nil
	case "ControllerUnpublishVolume":
		q := &csi.ControllerUnpublishVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.secrets[method] = q.Secrets
		node := strings.TrimPrefix(q.NodeId, "id-")
		if d.mounted[q.VolumeId][node] {
			d.complain("volume %s is taken from %s, which has it mounted", q.VolumeId, node)
		}
		if d.at[q.VolumeId] == q.NodeId {
			delete(d.at, q.VolumeId)
		}
		return &csi.ControllerUnpublishVolumeResponse{}, nil
	case "CreateVolume":
		q := &csi.CreateVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.made[q.Name] = true
		return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: q.Name, CapacityBytes: q.CapacityRange.RequiredBytes}}, nil
	case "DeleteVolume":
		q := &csi.DeleteVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		if at := d.at[q.VolumeId]; at != "" {
			d.complain("volume %s is deleted while %s has it", q.VolumeId, at)
		}
		delete(d.made, q.VolumeId)
		return &csi.DeleteVolumeResponse{}, nil
	}
	return nil, status.Error(codes.Unimplemented, method)
}

// power cuts a node off, or brings it back with nothing mounted.
func (w *world) power(node string, on bool) {
	w.t.Helper()
	w.nodes.set(w.nodes.dead, node, !on)
	d := w.drivers.disks
	d.set(func() {
		d.dead[node] = !on
		for _, m := range d.mounted {
			delete(m, node)
		}
	})
	state := corev1.ConditionTrue
	if !on {
		state = corev1.ConditionUnknown
	}
	w.setReady(node, state)
}

// disksOn has a driver that attaches on nodes, and whoever mounts its volumes there.
func (w *world) disksOn(nodes ...string) *disks {
	w.t.Helper()
	d := &disks{made: map[string]bool{}, at: map[string]string{}, mounted: map[string]map[string]bool{}, dead: map[string]bool{}, secrets: map[string]map[string]string{},
		unmounts: true, tells: true, shows: map[string]string{}}
	w.drivers.set(func() { w.drivers.disks = d })
	w.create(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: diskDriver, Annotations: map[string]string{controllers.ServedByAnnotation: controllers.ServedByAgent}}})
	for _, n := range nodes {
		update(w, n, func(n *corev1.Node) {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, api.AnnotationFencesAfter, "20")
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, api.AnnotationVolumesInUse, "told")
		})
		w.create(&storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: n}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: diskDriver, NodeID: "id-" + n}}}})
	}
	ctx, cancel := context.WithCancel(w.ctx)
	var running sync.WaitGroup
	for _, n := range nodes {
		running.Go(func() {
			for ctx.Err() == nil {
				w.mounts(ctx, d, n)
				time.Sleep(250 * time.Millisecond) // of virtual time
			}
		})
	}
	w.t.Cleanup(func() { cancel(); running.Wait() })
	return d
}

// mounts performs one step of a node's agent: it reports a volume before it mounts it, and until it
// has unmounted it.
func (w *world) mounts(ctx context.Context, d *disks, node string) {
	d.mu.Lock()
	dead := d.dead[node]
	d.mu.Unlock()
	n, err := client.Get[*corev1.Node](ctx, w.admin, "", node)
	if err != nil || dead {
		return
	}
	if c := controllers.NodeCondition(n, corev1.NodeReady); c == nil || c.Status != corev1.ConditionTrue {
		return
	}
	wanted := map[string]bool{} // PersistentVolumes
	for _, p := range w.pods() {
		for _, v := range p.Spec.Volumes {
			if v.PersistentVolumeClaim == nil || p.Spec.NodeName != node || controllers.IsPodTerminal(p) {
				continue
			}
			c, err := client.Get[*corev1.PersistentVolumeClaim](ctx, w.admin, "default", v.PersistentVolumeClaim.ClaimName)
			if err == nil && c.Spec.VolumeName != "" {
				wanted[c.Spec.VolumeName] = true
			}
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	needed := map[string]bool{}
	for v := range wanted {
		needed[d.handle(v)] = true
	}
	if d.dead[node] {
		return
	}
	inUse := []corev1.UniqueVolumeName{}
	for h := range needed {
		name := d.name(h)
		inUse = append(inUse, name)
		has := slices.ContainsFunc(n.Status.VolumesAttached, func(v corev1.AttachedVolume) bool { return v.Name == name })
		if has && slices.Contains(n.Status.VolumesInUse, name) && !d.mounted[h][node] {
			d.mount(h, node)
		}
	}
	for h, m := range d.mounted {
		if m[node] && !needed[h] {
			if d.unmounts {
				delete(m, node)
			}
			inUse = append(inUse, d.name(h)) // until the next step
		}
	}
	slices.Sort(inUse)
	d.tell(ctx, w, n)
	if inUse = slices.Compact(inUse); !slices.Equal(inUse, n.Status.VolumesInUse) {
		next := n.DeepCopy()
		next.Status.VolumesInUse = inUse
		_, _ = client.UpdateStatus(ctx, w.admin, next) // the next step retries
	}
}

// tell writes the mounted volumes to a node's object, if agents report them.
func (d *disks) tell(ctx context.Context, w *world, n *corev1.Node) {
	if !d.tells {
		return
	}
	held := []corev1.UniqueVolumeName{}
	for h, m := range d.mounted {
		if m[n.Name] {
			held = append(held, d.name(h))
		}
	}
	slices.Sort(held)
	said, err := json.Marshal(held)
	if err != nil || n.Annotations[api.AnnotationVolumesHeld] == string(said) {
		return
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{api.AnnotationVolumesHeld: string(said)}}})
	if err == nil {
		_, _ = client.Patch[*corev1.Node](ctx, w.admin, "", n.Name, "", types.MergePatchType, patch) // the next step retries
	}
}

func (d *disks) mount(h, node string) {
	if !d.iscsi && d.at[h] != "id-"+node {
		d.complain("volume %s is mounted on %s, and published to %q", h, node, d.at[h])
	}
	if d.mounted[h] == nil {
		d.mounted[h] = map[string]bool{}
	}
	d.mounted[h][node] = true
	if len(d.mounted[h]) > 1 {
		d.complain("volume %s is mounted on %v", h, slices.Sorted(maps.Keys(d.mounted[h])))
	}
}

// eventWith waits for an event whose message contains a text.
func (w *world) eventWith(reason, words string) {
	w.t.Helper()
	w.eventually("event "+reason+" "+words, func() error {
		list, err := client.List[*corev1.Event](w.ctx, w.admin, "", metav1.ListOptions{})
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

// disk creates a volume of the driver with its name as handle.
func (w *world) disk(name string) {
	w.t.Helper()
	w.diskOf(name, name, "192.0.2.1")
}

// diskOf creates a volume of the driver for a handle, or an iSCSI volume for some portals of the
// target.
func (w *world) diskOf(name, handle string, portals ...string) {
	w.t.Helper()
	w.drivers.disks.set(func() { w.drivers.disks.shows[name] = handle })
	v := volume(name, "1Gi")
	v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: diskDriver, VolumeHandle: handle,
		ControllerPublishSecretRef: &corev1.SecretReference{Namespace: "default", Name: "key"}}}
	if w.drivers.disks.iscsi {
		target := "iqn.2026-01.example:" + handle
		if name != handle { // names of targets are the same in capitals
			target = "iqn.2026-01.Example:" + strings.ToUpper(handle)
		}
		v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{ISCSI: &corev1.ISCSIPersistentVolumeSource{TargetPortal: portals[0], Portals: portals[1:], IQN: target, Lun: 3}}
	}
	w.create(v)
}

// user is a pod on a node that uses a claim.
func user(name, node, claim string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PodSpec{NodeName: node,
		Containers: []corev1.Container{{Name: "c", Image: "i"}},
		Volumes:    []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}}}}
}

// mountedOn waits until a volume is mounted on a node and nowhere else; "" = nowhere, and attached to none.
func (w *world) mountedOn(within time.Duration, handle, node string) {
	w.t.Helper()
	d := w.drivers.disks
	w.within(within, "volume "+handle+" on "+node, func() error {
		list, err := client.List[*storagev1.VolumeAttachment](w.ctx, w.admin, "", metav1.ListOptions{})
		if err != nil {
			return err
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		list = slices.DeleteFunc(list, func(a *storagev1.VolumeAttachment) bool {
			return d.handle(*a.Spec.Source.PersistentVolumeName) != handle
		})
		on := slices.Collect(maps.Keys(d.mounted[handle]))
		switch {
		case node == "" && (len(on) > 0 || d.at[handle] != "" || len(list) > 0), node != "" && (len(on) != 1 || on[0] != node || len(list) != 1):
			return fmt.Errorf("mounted on %v, published to %q, %d attachments", on, d.at[handle], len(list))
		}
		return nil
	})
}

func (w *world) nothingWrong() {
	w.t.Helper()
	d := w.drivers.disks
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.wrong {
		w.t.Error(s)
	}
}
