package devices

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1"

	"keelson.dev/keelson/agent"
)

// How long a driver's report about the health of a device is valid: the default, and the maximum.
const (
	defaultReportLifetime = 30 * time.Second
	maxReportLifetime     = 24 * time.Hour
)

// deviceID identifies a device of a driver.
type deviceID struct{ pool, name string }

// deviceHealth is the health of a device as its driver reported it.
type deviceHealth struct {
	status     v1.ResourceHealthStatus
	message    string
	validFor   time.Duration
	validUntil time.Time
}

// healthCache caches the health of devices that drivers reported. A report contains all devices of
// its driver. If a report omits a device, or the driver stops reporting, the last report about the
// device remains valid until it expires.
type healthCache struct {
	changed func()

	mu       sync.Mutex
	byDriver map[string]*driverHealth
}

// driverHealth is the health of a driver's devices, as reported by the newest plugin process of the
// driver.
type driverHealth struct {
	order   int // registration order of the plugin process
	devices map[deviceID]deviceHealth
	timer   *time.Timer // fires when the next report expires
}

func newHealth(changed func()) *healthCache {
	return &healthCache{changed: changed, byDriver: map[string]*driverHealth{}}
}

// setReport stores a health report of the plugin p. It ignores the report if a newer plugin process
// of the same driver has reported.
func (h *healthCache) setReport(p *driverPlugin, devices map[deviceID]deviceHealth, now time.Time) {
	h.mu.Lock()
	t := h.byDriver[p.name]
	if t == nil {
		t = &driverHealth{devices: map[deviceID]deviceHealth{}}
		h.byDriver[p.name] = t
	}
	if p.order < t.order {
		h.mu.Unlock()
		return
	}
	t.order = p.order
	maps.DeleteFunc(t.devices, func(d deviceID, w deviceHealth) bool {
		_, again := devices[d]
		return !again && !now.Before(w.validUntil)
	})
	news := false
	for d, w := range devices {
		before, had := t.devices[d]
		news = news || !had || before.status != w.status || before.message != w.message ||
			!now.Before(before.validUntil)
		w.validUntil = now.Add(w.validFor)
		if _, had := t.devices[d]; had || len(t.devices) < 2*maxReported {
			t.devices[d] = w
		}
	}
	h.scheduleExpiry(t, now)
	h.mu.Unlock()
	if news {
		h.changed()
	}
}

// scheduleExpiry schedules a change notification for the time when the next health report of the
// driver expires. The caller holds the lock.
func (h *healthCache) scheduleExpiry(t *driverHealth, now time.Time) {
	var next time.Time
	for _, w := range t.devices {
		if w.validUntil.After(now) && (next.IsZero() || w.validUntil.Before(next)) {
			next = w.validUntil
		}
	}
	if t.timer != nil {
		t.timer.Stop()
	}
	if !next.IsZero() {
		t.timer = time.AfterFunc(next.Sub(now), func() {
			h.mu.Lock()
			h.scheduleExpiry(t, time.Now())
			h.mu.Unlock()
			h.changed()
		})
	}
}

// removePlugin removes the health reports of a plugin that has disconnected. A disconnected driver
// can no longer correct them, even if they have not expired.
func (h *healthCache) removePlugin(p *driverPlugin) {
	h.mu.Lock()
	t := h.byDriver[p.name]
	mine := t != nil && t.order == p.order
	if mine {
		if t.timer != nil {
			t.timer.Stop()
		}
		delete(h.byDriver, p.name)
	}
	h.mu.Unlock()
	if mine {
		h.changed()
	}
}

func (h *healthCache) deviceHealthAt(driver string, d deviceID, now time.Time) (v1.ResourceHealthStatus, string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if t := h.byDriver[driver]; t != nil {
		if w, ok := t.devices[d]; ok && now.Before(w.validUntil) {
			return w.status, w.message
		}
	}
	return v1.ResourceHealthStatusUnknown, ""
}

func statusOf(s drahealth.HealthStatus) v1.ResourceHealthStatus {
	switch s {
	case drahealth.HealthStatus_HEALTHY:
		return v1.ResourceHealthStatusHealthy
	case drahealth.HealthStatus_UNHEALTHY:
		return v1.ResourceHealthStatusUnhealthy
	}
	return v1.ResourceHealthStatusUnknown
}

// truncateMessage truncates a health message to the maximum length in a pod's status.
func truncateMessage(s string) string {
	const end = "..."
	if len(s) > v1.ResourceHealthMessageMaxLength {
		s = strings.ToValidUTF8(s[:v1.ResourceHealthMessageMaxLength-len(end)], "") + end
	}
	return s
}

func reportLifetime(seconds int64) time.Duration {
	if seconds <= 0 {
		return defaultReportLifetime
	}
	return min(time.Duration(min(seconds, int64(maxReportLifetime/time.Second)))*time.Second, maxReportLifetime)
}

// preparedClaims returns the records of a pod's claims with prepared devices. The keys are the
// names of the entries in spec.resourceClaims.
func (d *Devices) preparedClaims(pod *v1.Pod) map[string]*claimRecord {
	if len(pod.Spec.ResourceClaims) == 0 {
		return nil
	}
	mine, has := d.records.preparedRecords(pod.UID), map[string]*claimRecord{}
	for i := range pod.Spec.ResourceClaims {
		entry := &pod.Spec.ResourceClaims[i]
		if name, _, err := resourceclaim.Name(pod, entry); err == nil && name != nil {
			if r := mine[*name]; r != nil {
				has[entry.Name] = r
			}
		}
	}
	return has
}

// forEachUse calls visit for every reference of a container of the pod to a prepared claim. records
// contains the records of the prepared claims by the name of the entry in spec.resourceClaims.
func forEachUse(
	pod *v1.Pod, records map[string]*claimRecord, visit func(container string, r *claimRecord, use v1.ResourceClaim),
) {
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			for _, use := range list[i].Resources.Claims {
				if r := records[use.Name]; r != nil {
					visit(list[i].Name, r, use)
				}
			}
		}
	}
}

// Health returns the health of the devices that each container of a pod uses, by container name. It
// implements agent.Devices.
func (d *Devices) Health(pod *v1.Pod) map[string][]v1.ResourceStatus {
	has := d.preparedClaims(pod)
	if len(has) == 0 {
		return nil
	}
	out, now := map[string][]v1.ResourceStatus{}, time.Now()
	forEachUse(pod, has, func(container string, r *claimRecord, use v1.ResourceClaim) {
		out[container] = append(out[container], d.claimStatus(r, use, now))
	})
	return out
}

// ContainerClaims returns the claims that each container of a pod uses, with their devices, by
// container name. A device is listed once even if the container refers to its claim several times.
func (d *Devices) ContainerClaims(pod *v1.Pod) map[string][]agent.ContainerClaim {
	out := map[string][]agent.ContainerClaim{}
	forEachUse(pod, d.preparedClaims(pod), func(container string, r *claimRecord, use v1.ResourceClaim) {
		all := out[container]
		i := slices.IndexFunc(all, func(c agent.ContainerClaim) bool { return c.Name == r.Name })
		if i < 0 {
			i = len(all)
			all = append(all, agent.ContainerClaim{Namespace: r.Namespace, Name: r.Name})
		}
		for _, dev := range r.Devices {
			same := func(o agent.ClaimedDevice) bool {
				return o.Driver == dev.Driver && o.Pool == dev.Pool && o.Device == dev.Device &&
					o.ShareID == dev.ShareID && slices.Equal(o.CDI, dev.CDI)
			}
			if dev.MatchesRequest(use.Request) && !slices.ContainsFunc(all[i].Devices, same) {
				all[i].Devices = append(all[i].Devices, dev)
			}
		}
		out[container] = all
	})
	return out
}

// claimStatus returns the current health of the devices that a container uses through a reference
// to a claim. r is the claim's record, and now the current time.
func (d *Devices) claimStatus(r *claimRecord, reference v1.ResourceClaim, now time.Time) v1.ResourceStatus {
	s := v1.ResourceStatus{Name: v1.ResourceName("claim:" + reference.Name)}
	if reference.Request != "" {
		s.Name += v1.ResourceName("/" + reference.Request)
	}
	for _, dev := range r.Devices {
		if dev.Driver == "" || !dev.MatchesRequest(reference.Request) {
			continue // prepared by an earlier agent that did not store the device's name
		}
		id := v1.ResourceID(dev.Driver + "/" + dev.Pool + "/" + dev.Device)
		if slices.ContainsFunc(s.Resources, func(h v1.ResourceHealth) bool { return h.ResourceID == id }) {
			continue
		}
		h := v1.ResourceHealth{ResourceID: id}
		var text string
		if h.Health, text = d.health.deviceHealthAt(dev.Driver, deviceID{dev.Pool, dev.Device}, now); text != "" {
			h.Message = &text
		}
		s.Resources = append(s.Resources, h)
	}
	return s
}
