package pod

import (
	"slices"

	v1 "k8s.io/api/core/v1"
)

// reasonNotAdmitted is the pod's status reason if its devices cannot be allocated, as in the
// kubelet.
const reasonNotAdmitted = "UnexpectedAdmissionError"

// notifyDeviceChange wakes the worker if its pod has devices, because their health may have
// changed.
func (w *worker) notifyDeviceChange() {
	w.mu.Lock()
	held := w.observed.Devices.Held
	w.mu.Unlock()
	if held {
		w.wakeUp()
	}
}

// updateDeviceHealth updates the observed health of the pod's devices, from device plugins and from
// the drivers of resource claims. The lock is held.
func (w *worker) updateDeviceHealth() {
	health := w.cfg.Deps.Devices.Health(w.desired.Pod)
	if w.cfg.Deps.Plugins != nil {
		for c, statuses := range w.cfg.Deps.Plugins.Health(w.desired.Pod.UID) {
			if health == nil {
				health = map[string][]v1.ResourceStatus{}
			}
			health[c] = slices.Concat(statuses, health[c])
		}
	}
	w.observed.Devices.Health, w.observed.Devices.Held = health, health != nil
}
