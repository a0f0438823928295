package volume

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
)

// republishInterval is the minimum time between two publish calls for a volume of a driver with
// requiresRepublish.
const republishInterval = time.Minute

// recordPublished records that the driver is being called now to publish the volume with the record
// file.
func (v *csiVolumes) recordPublished(file string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.publishedAt == nil {
		v.publishedAt = map[string]time.Time{}
	}
	v.publishedAt[file] = time.Now()
}

// republishCSI makes the driver publish a volume again, with new tokens and secrets, if its
// CSIDriver has requiresRepublish. It does nothing within republishInterval of the previous call.
// After a failure the pod keeps its current content.
func (v *csiVolumes) republishCSI(ctx context.Context, pod *v1.Pod, vol *v1.Volume) error {
	s, ok := v.csiSourceOf(pod, vol)
	if !ok || v.cfg.CSI == nil {
		return nil
	}
	about, _ := v.cfg.Objects.CSIDriver(s.driver)
	if about == nil || about.Spec.RequiresRepublish == nil || !*about.Spec.RequiresRepublish {
		return nil
	}
	file := v.csiRecordFile(pod.UID, vol.Name)
	v.mu.Lock()
	due := time.Since(v.publishedAt[file]) >= republishInterval
	v.mu.Unlock()
	if !due {
		return nil
	}
	defer v.locks.Lock(s.driver + "\x00" + s.handle)()
	r, err := v.csiPaths(pod.UID, vol.Name, s)
	if err != nil || !v.isReady(file, r) {
		return err // it is not published yet, or no longer
	}
	d, err := v.cfg.CSI.Driver(ctx, s.driver)
	if err != nil {
		return fmt.Errorf("%s: publishing it again: %w", s, err)
	}
	cv, err := v.driverVolume(pod, s, r)
	if err == nil {
		err = v.addPodInfo(ctx, &cv, pod, about, s.inline)
	}
	if err != nil {
		return fmt.Errorf("%s: publishing it again: %w", s, err)
	}
	v.recordPublished(file) // counts before the call, so that a failing driver is not called more often
	if err := d.Publish(ctx, cv); err != nil {
		return fmt.Errorf("publishing it again: %w", err)
	}
	return nil
}

// csiSourceOf returns the CSI volume that a pod's volume refers to, inline or through its claim. ok
// is false if the volume is not a CSI volume, or its claim is not usable.
func (v *csiVolumes) csiSourceOf(pod *v1.Pod, vol *v1.Volume) (s csiSource, ok bool) {
	if vol.CSI != nil {
		return inlineSource(pod, vol), true
	}
	name, readonly := claimName(pod, vol)
	if name == "" {
		return csiSource{}, false
	}
	claim, pv, err := boundClaim(v.cfg.Objects, pod, vol, name)
	if err != nil || pv.Spec.CSI == nil {
		return csiSource{}, false
	}
	return persistentSource(pv, claim, readonly), true
}
