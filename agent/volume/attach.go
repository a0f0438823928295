package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/csi/local"
)

// attachPatience is how long a volume is waited for before the pod is told that it waits. The wait goes on at once when
// something has changed.
const attachPatience = 3 * time.Second

// attachRequired says whether a driver's volumes are attached to nodes before these mount them: as documented also where
// the driver has no object. That of the node's own disks has one that says no, and may be heard of late.
func attachRequired(driver string, about *storagev1.CSIDriver) bool {
	return driver != local.DriverName && (about == nil || about.Spec.AttachRequired == nil || *about.Spec.AttachRequired)
}

// iscsiAttacher is by whom iSCSI volumes of claims are attached: the control plane.
const iscsiAttacher = "iscsi.keelson.dev"

// attachedName is how the node's status names a volume.
func attachedName(driver, handle string) v1.UniqueVolumeName {
	if driver == iscsiAttacher {
		return v1.UniqueVolumeName("kubernetes.io/iscsi/" + handle)
	}
	return v1.UniqueVolumeName("kubernetes.io/csi/" + driver + "^" + handle)
}

// inUse calls f for each attached volume that is mounted, or may be: from before the first call of its driver, or the login to its
// target, for a pod until the last after the pod. One that only waits to be attached is among them, and is not held.
func (v *Volumes) inUse(f func(pod types.UID, name v1.UniqueVolumeName, held bool)) error {
	pods, err := v.Pods()
	if err != nil {
		return err
	}
	for _, p := range pods {
		recs, err := v.records(p)
		if err != nil {
			return err
		}
		for _, r := range recs {
			if r.Attach {
				f(p, attachedName(r.Driver, r.Volume), !r.Awaits)
			}
		}
		disks, err := v.iscsiRecords(p)
		if err != nil {
			return err
		}
		for _, r := range disks {
			if r.Attach {
				f(p, attachedName(iscsiAttacher, r.handle()), !r.Awaits)
			}
		}
	}
	return nil
}

// VolumesInUse implements agent.AttachedVolumes. What it lists lies on disk.
func (v *Volumes) VolumesInUse() (names, held []v1.UniqueVolumeName, err error) {
	names = []v1.UniqueVolumeName{}
	err = v.inUse(func(_ types.UID, name v1.UniqueVolumeName, has bool) {
		names = append(names, name)
		if has {
			held = append(held, name)
		}
	})
	if err != nil {
		return nil, nil, fmt.Errorf("listing the attached volumes in use: %w", err)
	}
	slices.Sort(names)
	slices.Sort(held)
	return slices.Compact(names), slices.Compact(held), nil
}

// PodsWithAttachedVolumes lists the pods that use attached volumes.
func (v *Volumes) PodsWithAttachedVolumes() ([]types.UID, error) {
	var pods []types.UID
	if err := v.inUse(func(p types.UID, _ v1.UniqueVolumeName, _ bool) { pods = append(pods, p) }); err != nil {
		return nil, fmt.Errorf("listing the pods with attached volumes: %w", err)
	}
	slices.Sort(pods)
	return slices.Compact(pods), nil
}

// UsesChanged has a value when what InUse says may have changed.
func (v *Volumes) UsesChanged() <-chan struct{} { return v.uses }

func (v *Volumes) useChanged() {
	select {
	case v.uses <- struct{}{}:
	default:
	}
}

// awaits says of a volume of a pod whose record is written now whether nothing has been done for it: there is no record yet, or it says
// so. One of a release that did not write it leaves that to what is on the node: where nodes that wait all said that they have the
// volume, none would ever get it. One that cannot be read counts as of a volume that may be mounted.
func awaits(file string, untouched func() bool) bool {
	b, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return true
	}
	var r struct {
		Awaits *bool `json:"awaits"`
		Ready  bool  `json:"ready"`
	}
	switch {
	case err != nil || json.Unmarshal(b, &r) != nil:
		return false
	case r.Awaits != nil:
		return *r.Awaits
	}
	return !r.Ready && untouched()
}

// attached waits until a volume may be mounted, and returns what the driver said when it attached it.
func (v *Volumes) attached(ctx context.Context, s source) (publish map[string]string, err error) {
	why := ""
	known, err := v.untilKnown(ctx, func() bool {
		publish, why = v.mayMount(s)
		return why == ""
	})
	switch {
	case err != nil:
		return nil, err
	case !known:
		return nil, fmt.Errorf("%s is not attached to this node: %s", s, why)
	}
	return publish, nil
}

// untilKnown has the control plane told what is used, and waits until the objects that come from it say so. It is false when they do not
// in attachPatience: the pod's volumes are tried again later.
func (v *Volumes) untilKnown(ctx context.Context, said func() bool) (bool, error) {
	v.useChanged()
	patience, cancel := context.WithTimeout(ctx, attachPatience)
	defer cancel()
	for changes := v.cfg.Objects.Changes(patience); !said(); {
		select {
		case _, ok := <-changes:
			if ok {
				continue
			}
		case <-patience.Done():
		}
		return false, ctx.Err()
	}
	return true, nil
}

// mayMount says why a volume may not be mounted now; "" when it may. One revision of the node's object has to say both
// that the node uses the volume and that the volume is attached: who takes it away writes the same object, and before the
// volume is taken. What was known before the agent began is not enough, nor what was known before a long silence.
func (v *Volumes) mayMount(s source) (publish map[string]string, why string) {
	select {
	case <-v.cfg.Objects.Confirmed():
	default:
		return nil, "the control plane has not been heard since the agent began"
	}
	if v.cfg.Fenced != nil && v.cfg.Fenced() {
		return nil, "the control plane has not been heard for too long"
	}
	a, ok := v.cfg.Objects.VolumeAttachment(s.driver, s.handle)
	switch {
	case !ok:
		return nil, "it has no VolumeAttachment to this node yet (kubectl describe of the pod says whether another node has it)"
	case a.DeletionTimestamp != nil:
		return nil, fmt.Sprintf("it is being detached (VolumeAttachment %s)", a.Name)
	case !a.Status.Attached && a.Status.AttachError != nil:
		return nil, fmt.Sprintf("CSI driver %s: %s (VolumeAttachment %s)", s.driver, a.Status.AttachError.Message, a.Name)
	case !a.Status.Attached && s.driver == iscsiAttacher:
		return nil, fmt.Sprintf("waiting for the control plane (VolumeAttachment %s)", a.Name)
	case !a.Status.Attached:
		return nil, fmt.Sprintf("waiting for the attacher of CSI driver %s (VolumeAttachment %s)", s.driver, a.Name)
	}
	n, ok := v.cfg.Objects.Node()
	if !ok {
		return nil, "the node's own object is not known yet"
	}
	name := attachedName(s.driver, s.handle)
	lost := slices.ContainsFunc(n.Status.Conditions, func(c v1.NodeCondition) bool { return c.Type == v1.NodeReady && c.Status == v1.ConditionUnknown })
	switch {
	case !slices.Contains(n.Status.VolumesInUse, name), lost:
		return nil, "waiting for the control plane to know that this node uses it (status.volumesInUse)"
	case !slices.ContainsFunc(n.Status.VolumesAttached, func(x v1.AttachedVolume) bool { return x.Name == name }):
		return nil, "the node's status.volumesAttached does not name it yet"
	}
	return a.Status.AttachmentMetadata, ""
}
