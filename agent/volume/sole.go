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

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/csi/local"
	"keelson.dev/keelson/internal/durable"
)

// unheardAnnotation is on a PersistentVolume of a backup that was restored until it is known that no node has it for a pod that is not in the
// backup.
const unheardAnnotation = "keelson.dev/unheard-since-restore"

// alone keeps a claim with access mode ReadWriteOncePod, and the volume that it is bound to, to one pod of this node: to the first that asks,
// until its volumes are unmounted. The mark STATE/volumes/UID/alone/CLAIM outlives the agent. The node tells of it, and a volume that
// other nodes reach as well is mounted when the control plane has heard that: one that is restored from a backup goes by what nodes tell.
func (v *Volumes) alone(ctx context.Context, pod *v1.Pod, claim *v1.PersistentVolumeClaim, pv *v1.PersistentVolume) error {
	if !slices.Contains(claim.Spec.AccessModes, v1.ReadWriteOncePod) {
		return nil
	}
	if err := checkUID(claim.UID); err != nil {
		return fmt.Errorf("claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	mine := agent.HeldClaim{Pod: pod.UID, Claim: claim.UID, Volume: pv.Name}
	elsewhere := v.reached(pv)
	_, unheard := pv.Annotations[unheardAnnotation]
	if err := v.mark(claim, mine, unheard && elsewhere); err != nil || !elsewhere {
		return err
	}
	return v.untilTold(ctx, claim, mine)
}

// reached says that other nodes have what this one has of a volume whenever they like: it is not on the node, nor attached to one.
func (v *Volumes) reached(pv *v1.PersistentVolume) bool {
	if pv.Spec.CSI == nil {
		return pv.Spec.NFS != nil
	}
	about, _ := v.cfg.Objects.CSIDriver(pv.Spec.CSI.Driver)
	return pv.Spec.CSI.Driver != local.DriverName && !attachRequired(pv.Spec.CSI.Driver, about)
}

func (v *Volumes) markFile(h agent.HeldClaim) string {
	return filepath.Join(v.podDir(h.Pod), "alone", string(h.Claim))
}

// mark makes the mark of a pod, unless another pod has one of the claim or of its volume, or it is not known yet whether one of another node does.
// A pod that has its mark already keeps it.
func (v *Volumes) mark(claim *v1.PersistentVolumeClaim, mine agent.HeldClaim, unheard bool) error {
	defer v.locks.Lock("alone")()
	all, err := v.ExclusiveClaims()
	if err != nil {
		return fmt.Errorf("looking for other pods with claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	if slices.Contains(all, mine) {
		return nil
	}
	has := false // from an agent that did not note the volume
	for _, h := range all {
		switch {
		case h.Pod == mine.Pod:
			has = has || h.Claim == mine.Claim
		case h.Claim == mine.Claim:
			return fmt.Errorf("persistentvolumeclaim \"%s/%s\" uses the ReadWriteOncePod access mode and is already in use by another pod", claim.Namespace, claim.Name)
		case h.Volume == mine.Volume:
			return fmt.Errorf("persistentvolumeclaim \"%s/%s\" uses the ReadWriteOncePod access mode and its volume %q is already in use by another pod, of uid %s, as that of a former claim",
				claim.Namespace, claim.Name, h.Volume, h.Pod)
		}
	}
	if unheard && !has {
		return fmt.Errorf("persistentvolumeclaim \"%s/%s\" uses the ReadWriteOncePod access mode, and since a backup was restored it is not known yet whether a pod of another node uses it: "+
			"it waits for what nodes say (annotation %s of persistentvolume %s)", claim.Namespace, claim.Name, unheardAnnotation, mine.Volume)
	}
	b, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	if err := durable.Write(v.markFile(mine), b); err != nil {
		return err
	}
	if !has {
		v.mu.Lock()
		if v.untold == nil {
			v.untold = map[agent.HeldClaim]bool{}
		}
		v.untold[mine] = true
		v.mu.Unlock()
	}
	return nil
}

// untilTold waits until the control plane has heard that a pod has its claim for itself. What was marked before the agent began is among the
// first that it tells.
func (v *Volumes) untilTold(ctx context.Context, claim *v1.PersistentVolumeClaim, mine agent.HeldClaim) error {
	v.mu.Lock()
	waits := v.untold[mine]
	v.mu.Unlock()
	if !waits {
		return nil
	}
	known, err := v.untilKnown(ctx, func() bool {
		n, ok := v.cfg.Objects.Node()
		return ok && agent.NodeReportsClaim(n, mine)
	})
	switch {
	case err != nil:
		return err
	case !known:
		return fmt.Errorf("persistentvolumeclaim \"%s/%s\" uses the ReadWriteOncePod access mode: waiting for the control plane to know that this pod uses it (annotation %s of the node)",
			claim.Namespace, claim.Name, agent.ClaimsHeldAnnotation)
	}
	v.mu.Lock()
	delete(v.untold, mine)
	v.mu.Unlock()
	return nil
}

// ExclusiveClaims implements agent.AttachedVolumes. What it lists lies on disk.
func (v *Volumes) ExclusiveClaims() ([]agent.HeldClaim, error) {
	pods, err := v.Pods()
	if err != nil {
		return nil, err
	}
	var out []agent.HeldClaim
	for _, p := range pods {
		entries, err := os.ReadDir(filepath.Join(v.podDir(p), "alone"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("listing the claims that pods have for themselves: %w", err)
		}
		for _, e := range entries {
			h := agent.HeldClaim{Pod: p, Claim: types.UID(e.Name())}
			var noted agent.HeldClaim
			b, err := os.ReadFile(v.markFile(h))
			if errors.Is(err, os.ErrNotExist) || strings.HasSuffix(e.Name(), ".tmp") { // on its way to be one
				continue
			}
			if err == nil && json.Unmarshal(b, &noted) == nil { // else it is of an agent that noted no volume
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

// forgetAlone is called when the volumes of a pod are gone.
func (v *Volumes) forgetAlone(pod types.UID) {
	v.mu.Lock()
	for h := range v.untold {
		if h.Pod == pod {
			delete(v.untold, h)
		}
	}
	v.mu.Unlock()
	v.useChanged()
}
