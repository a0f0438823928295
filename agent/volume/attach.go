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
	"keelson.dev/keelson/internal/wakeup"
)

// attachTimeout is how long the pod worker waits for an attachment before it reports an error. The
// wait ends as soon as the volume may be mounted.
const attachTimeout = 3 * time.Second

// attachRequired reports whether volumes of a driver must be attached to a node before they are
// mounted. As in Kubernetes, that is the default for a driver without a CSIDriver object. The
// built-in local driver never needs it, even if its CSIDriver object has not arrived yet.
func attachRequired(driver string, about *storagev1.CSIDriver) bool {
	return driver != local.DriverName && (about == nil || about.Spec.AttachRequired == nil ||
		*about.Spec.AttachRequired)
}

// iscsiAttacher is the attacher of iSCSI PersistentVolumes: the control plane itself.
const iscsiAttacher = "iscsi.keelson.dev"

// attachedName returns the name under which the node's status lists a volume of a driver.
func attachedName(driver, handle string) v1.UniqueVolumeName {
	if driver == iscsiAttacher {
		return v1.UniqueVolumeName("kubernetes.io/iscsi/" + handle)
	}
	return v1.UniqueVolumeName("kubernetes.io/csi/" + driver + "^" + handle)
}

// attachments waits until volumes of this node are attached, and lists the attached volumes that
// pods use.
type attachments struct {
	*layout
	uses wakeup.Signal // sent on a change of the attached volumes in use
}

// visitAttached calls f for each volume of a pod that must be attached to this node. It includes a
// volume from before the first driver call or iSCSI login until after the last driver call or
// logout. held is false while the volume only waits for its attachment.
func (v *attachments) visitAttached(f func(pod types.UID, name v1.UniqueVolumeName, held bool)) error {
	pods, err := v.Pods()
	if err != nil {
		return err
	}
	for _, p := range pods {
		recs, err := v.csiRecords(p)
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
				f(p, attachedName(iscsiAttacher, r.volumeHandle()), !r.Awaits)
			}
		}
	}
	return nil
}

// VolumesInUse returns the attached volumes that pods of this node use, as recorded on disk. names
// is for volumesInUse of the node's status. held omits volumes that only wait for their attachment.
// It implements agent.AttachedVolumes.
func (v *Volumes) VolumesInUse() (names, held []v1.UniqueVolumeName, err error) {
	names = []v1.UniqueVolumeName{}
	err = v.attachments.visitAttached(func(_ types.UID, name v1.UniqueVolumeName, has bool) {
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

// PodsWithAttachedVolumes returns the UIDs of the pods of this node that use volumes that require
// an attachment.
func (v *Volumes) PodsWithAttachedVolumes() ([]types.UID, error) {
	var pods []types.UID
	err := v.attachments.visitAttached(func(p types.UID, _ v1.UniqueVolumeName, _ bool) { pods = append(pods, p) })
	if err != nil {
		return nil, fmt.Errorf("listing the pods with attached volumes: %w", err)
	}
	slices.Sort(pods)
	return slices.Compact(pods), nil
}

// UsesChanged returns a channel that has a value when the result of VolumesInUse may have changed.
func (v *Volumes) UsesChanged() <-chan struct{} { return v.attachments.uses }

func (v *attachments) signalUses() {
	v.uses.Send()
}

// isAwaitingAttach reports whether a pod's volume only waits for its attachment, and the driver was
// not called yet. file is the volume's record. It returns true if the record does not exist, and
// otherwise the record's field awaits. An earlier release does not write that field; untouched is
// then called to inspect the node. It returns false for an unreadable record, because the volume
// may be mounted. A waiting node must not report that it holds the volume: if all waiting nodes
// did, the volume could never be attached.
func isAwaitingAttach(file string, untouched func() bool) bool {
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

// awaitAttached waits at most attachTimeout until the volume is attached and may be mounted. It
// returns the attachment metadata of its driver.
func (v *attachments) awaitAttached(ctx context.Context, s csiSource) (publish map[string]string, err error) {
	why := ""
	known, err := v.awaitObjects(ctx, func() bool {
		publish, why = v.mountBlocker(s)
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

// awaitObjects waits until said returns true. It calls said after every change of the objects from
// the control plane. First it signals that the volumes in use changed. It returns false without an
// error if the wait takes longer than attachTimeout; the pod worker retries later.
func (v *attachments) awaitObjects(ctx context.Context, said func() bool) (bool, error) {
	v.signalUses()
	patience, cancel := context.WithTimeout(ctx, attachTimeout)
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

// mountBlocker returns the reason why a CSI volume may not be mounted now, or "" if it may. publish
// is the attachment metadata of its driver. The volume may be mounted if one revision of the Node
// lists it in both volumesInUse and volumesAttached. The detach controller writes the same object
// before it detaches a volume, so that a mount cannot overlap with a detach. Objects from before
// the agent started, or from before a long disconnection, are not sufficient.
func (v *attachments) mountBlocker(s csiSource) (publish map[string]string, why string) {
	select {
	case <-v.cfg.Objects.Confirmed():
	default:
		return nil, "the agent has not reached the control plane since it started"
	}
	if v.cfg.Fenced != nil && v.cfg.Fenced() {
		return nil, "the node has been disconnected from the control plane for too long"
	}
	a, ok := v.cfg.Objects.VolumeAttachment(s.driver, s.handle)
	switch {
	case !ok:
		return nil, "it has no VolumeAttachment to this node yet (kubectl describe pod shows whether " +
			"another node has it)"
	case a.DeletionTimestamp != nil:
		return nil, fmt.Sprintf("it is being detached (VolumeAttachment %s)", a.Name)
	case !a.Status.Attached && a.Status.AttachError != nil:
		return nil, fmt.Sprintf("CSI driver %s: %s (VolumeAttachment %s)", s.driver,
			a.Status.AttachError.Message, a.Name)
	case !a.Status.Attached && s.driver == iscsiAttacher:
		return nil, fmt.Sprintf("waiting for the control plane (VolumeAttachment %s)", a.Name)
	case !a.Status.Attached:
		return nil, fmt.Sprintf("waiting for the attacher of CSI driver %s (VolumeAttachment %s)", s.driver, a.Name)
	}
	n, ok := v.cfg.Objects.Node()
	if !ok {
		return nil, "the agent has not received the node's object yet"
	}
	name := attachedName(s.driver, s.handle)
	lost := slices.ContainsFunc(n.Status.Conditions, func(c v1.NodeCondition) bool {
		return c.Type == v1.NodeReady && c.Status == v1.ConditionUnknown
	})
	switch {
	case !slices.Contains(n.Status.VolumesInUse, name), lost:
		return nil, "waiting for the control plane to record that this node uses it (status.volumesInUse)"
	case !slices.ContainsFunc(n.Status.VolumesAttached, func(x v1.AttachedVolume) bool { return x.Name == name }):
		return nil, "the node's status.volumesAttached does not list it yet"
	}
	return a.Status.AttachmentMetadata, ""
}
