package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/csi/local"
	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/keylock"
)

// unknownHoldersAnnotation is set on a PersistentVolume when the cluster was restored from a
// backup. Until it is removed, another node may still use the volume for a pod that is missing in
// the backup.
const unknownHoldersAnnotation = "keelson.dev/unheard-since-restore"

// exclusiveClaims reserves ReadWriteOncePod claims, and their volumes, for one pod of this node.
type exclusiveClaims struct {
	*layout
	attachments *attachments
	locks       keylock.Locks // with one key: reservations are made one after the other
	mu          sync.Mutex
	// unreported has the reservations of this process that the control plane may not have received.
	unreported map[agent.HeldClaim]bool
}

// claimExclusively reserves a ReadWriteOncePod claim and its volume for one pod of this node, until
// the pod's volumes are unmounted. It returns an error if another pod has reserved them. The
// reservation is the file STATE/volumes/UID/alone/CLAIM, which persists across restarts of the
// agent, and which the node reports. A volume that other nodes can also reach is mounted only after
// the control plane has received the report. A control plane that was restored from a backup relies
// on these reports.
func (v *exclusiveClaims) claimExclusively(
	ctx context.Context, pod *v1.Pod, claim *v1.PersistentVolumeClaim, pv *v1.PersistentVolume,
) error {
	if !slices.Contains(claim.Spec.AccessModes, v1.ReadWriteOncePod) {
		return nil
	}
	if err := checkUID(claim.UID); err != nil {
		return fmt.Errorf("claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	mine := agent.HeldClaim{Pod: pod.UID, Claim: claim.UID, Volume: pv.Name}
	elsewhere := v.isReachableElsewhere(pv)
	_, unheard := pv.Annotations[unknownHoldersAnnotation]
	if err := v.markClaim(claim, mine, unheard && elsewhere); err != nil || !elsewhere {
		return err
	}
	return v.awaitClaimReported(ctx, claim, mine)
}

// isReachableElsewhere reports whether other nodes can use the volume at any time: it is neither
// local to this node nor attached to a node.
func (v *exclusiveClaims) isReachableElsewhere(pv *v1.PersistentVolume) bool {
	if pv.Spec.CSI == nil {
		return pv.Spec.NFS != nil
	}
	about, _ := v.cfg.Objects.CSIDriver(pv.Spec.CSI.Driver)
	return pv.Spec.CSI.Driver != local.DriverName && !attachRequired(pv.Spec.CSI.Driver, about)
}

// markClaim writes the file that reserves a claim for the pod mine.Pod. It returns an error if
// another pod has reserved the claim or its volume. If unheard is set, reservations of other nodes
// are not known yet; it then returns an error unless the pod already has a reservation. It does
// nothing if the reservation exists.
func (v *exclusiveClaims) markClaim(claim *v1.PersistentVolumeClaim, mine agent.HeldClaim, unheard bool) error {
	defer v.locks.Lock("alone")()
	all, err := v.reservations()
	if err != nil {
		return fmt.Errorf("searching for other pods with claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	if slices.Contains(all, mine) {
		return nil
	}
	has := false // written by an agent that did not record the volume
	for _, h := range all {
		switch {
		case h.Pod == mine.Pod:
			has = has || h.Claim == mine.Claim
		case h.Claim == mine.Claim:
			return fmt.Errorf("persistentvolumeclaim \"%s/%s\" uses the ReadWriteOncePod access mode and is already "+
				"in use by another pod", claim.Namespace, claim.Name)
		case h.Volume == mine.Volume:
			return fmt.Errorf("persistentvolumeclaim \"%s/%s\" uses the ReadWriteOncePod access mode and its volume "+
				"%q is already in use by another pod with uid %s, through a previous claim",
				claim.Namespace, claim.Name, h.Volume, h.Pod)
		}
	}
	if unheard && !has {
		return fmt.Errorf("persistentvolumeclaim \"%s/%s\" uses the ReadWriteOncePod access mode, and after the "+
			"restore of a backup it is not known yet whether a pod of another node uses it: "+
			"waiting for the reports of other nodes (annotation %s of persistentvolume %s)", claim.Namespace,
			claim.Name, unknownHoldersAnnotation, mine.Volume)
	}
	b, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	if err := durable.WriteIfChanged(v.claimMarkPath(mine), b, durable.Intact); err != nil {
		return err
	}
	if !has {
		v.mu.Lock()
		if v.unreported == nil {
			v.unreported = map[agent.HeldClaim]bool{}
		}
		v.unreported[mine] = true
		v.mu.Unlock()
	}
	return nil
}

// awaitClaimReported waits at most attachTimeout until the control plane has received the report
// that the pod mine.Pod uses the claim. It does not wait for reservations from before the agent's
// start, because the first report contains them.
func (v *exclusiveClaims) awaitClaimReported(
	ctx context.Context, claim *v1.PersistentVolumeClaim, mine agent.HeldClaim,
) error {
	v.mu.Lock()
	waits := v.unreported[mine]
	v.mu.Unlock()
	if !waits {
		return nil
	}
	known, err := v.attachments.awaitObjects(ctx, func() bool {
		n, ok := v.cfg.Objects.Node()
		return ok && agent.NodeReportsClaim(n, mine)
	})
	switch {
	case err != nil:
		return err
	case !known:
		return fmt.Errorf("persistentvolumeclaim \"%s/%s\" uses the ReadWriteOncePod access mode: waiting for the "+
			"control plane to record that this pod uses it (annotation %s of the node)",
			claim.Namespace, claim.Name, agent.ClaimsHeldAnnotation)
	}
	v.mu.Lock()
	delete(v.unreported, mine)
	v.mu.Unlock()
	return nil
}

// reservations returns the ReadWriteOncePod claims that pods of this node have reserved, as
// recorded on disk.
func (v *exclusiveClaims) reservations() ([]agent.HeldClaim, error) {
	pods, err := v.Pods()
	if err != nil {
		return nil, err
	}
	var out []agent.HeldClaim
	for _, p := range pods {
		entries, err := os.ReadDir(filepath.Join(v.podDir(p), "alone"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("listing the exclusively used claims: %w", err)
		}
		for _, e := range entries {
			h := agent.HeldClaim{Pod: p, Claim: types.UID(e.Name())}
			var noted agent.HeldClaim
			b, err := os.ReadFile(v.claimMarkPath(h))
			if errors.Is(err, os.ErrNotExist) || strings.HasSuffix(e.Name(), ".tmp") { // a mark that is being written
				continue
			}
			if err == nil && json.Unmarshal(b, &noted) == nil {
				// otherwise the agent that wrote it did not record the volume
				h.Volume = noted.Volume
			}
			out = append(out, h)
		}
	}
	slices.SortFunc(out, func(a, b agent.HeldClaim) int {
		return strings.Compare(string(a.Pod)+"\x00"+string(a.Claim), string(b.Pod)+"\x00"+string(b.Claim))
	})
	return out, nil
}

// dropClaimMarks removes the unreported reservations of a pod from memory. It is called when the
// volumes of the pod have been removed.
func (v *exclusiveClaims) dropClaimMarks(pod types.UID) {
	v.mu.Lock()
	for h := range v.unreported {
		if h.Pod == pod {
			delete(v.unreported, h)
		}
	}
	v.mu.Unlock()
	v.attachments.signalUses()
}
