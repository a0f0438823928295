package volume

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
)

// republishEvery is the least time between two calls for a volume whose driver wants to be called again and again.
const republishEvery = time.Minute

// published notes that the driver was called for a volume of a pod just now.
func (v *Volumes) published(file string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.publishedAt == nil {
		v.publishedAt = map[string]time.Time{}
	}
	v.publishedAt[file] = time.Now()
}

// republish calls drivers that ask for it (requiresRepublish) once more for a volume that is published: with new tokens
// and secrets, of which they make what the pod sees. What fails leaves the pod what it has.
func (v *Volumes) republish(ctx context.Context, pod *v1.Pod, vol *v1.Volume) error {
	s, ok := v.sourceOf(pod, vol)
	if !ok || v.cfg.CSI == nil {
		return nil
	}
	about, _ := v.cfg.Objects.CSIDriver(s.driver)
	if about == nil || about.Spec.RequiresRepublish == nil || !*about.Spec.RequiresRepublish {
		return nil
	}
	file := v.recordFile(pod.UID, vol.Name)
	v.mu.Lock()
	due := time.Since(v.publishedAt[file]) >= republishEvery
	v.mu.Unlock()
	if !due {
		return nil
	}
	defer v.locks.Lock(s.driver + "\x00" + s.handle)()
	r, err := v.place(pod.UID, vol.Name, s)
	if err != nil || !v.ready(file, r) {
		return err // it is not published yet, or not any more
	}
	d, err := v.cfg.CSI.Driver(ctx, s.driver)
	if err != nil {
		return fmt.Errorf("%s: publishing it again: %w", s, err)
	}
	cv, err := v.describe(pod, s, r)
	if err == nil {
		err = v.addressedTo(ctx, &cv, pod, about, s.inline)
	}
	if err != nil {
		return fmt.Errorf("%s: publishing it again: %w", s, err)
	}
	v.published(file) // a driver that fails is not called more often than one that does not
	if err := d.Publish(ctx, cv); err != nil {
		return fmt.Errorf("publishing it again: %w", err)
	}
	return nil
}

// sourceOf is the CSI volume behind a volume of a pod; ok is false where there is none, or none that can be used.
func (v *Volumes) sourceOf(pod *v1.Pod, vol *v1.Volume) (s source, ok bool) {
	if vol.CSI != nil {
		return inline(pod, vol), true
	}
	name, readonly := claimName(pod, vol)
	if name == "" {
		return source{}, false
	}
	claim, pv, err := v.bound(pod, vol, name)
	if err != nil || pv.Spec.CSI == nil {
		return source{}, false
	}
	return persistent(pv, claim, readonly), true
}
