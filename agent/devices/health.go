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

// For how long a report counts: unless the driver says otherwise, and at most.
const (
	reportLasts = 30 * time.Second
	reportMost  = 24 * time.Hour
)

// device is one of a driver's.
type device struct{ pool, name string }

// wellness is what a driver told of a device.
type wellness struct {
	status  v1.ResourceHealthStatus
	message string
	lasts   time.Duration
	until   time.Time
}

// health keeps what drivers told of their devices. A report is of all devices of its driver; of one that it leaves out, or of
// a driver that says no more, the last word counts as long as it was meant to.
type health struct {
	changed func()

	mu       sync.Mutex
	byDriver map[string]*told
}

// told is what the newest plugin of a driver said.
type told struct {
	order   int // of the plugin
	devices map[device]wellness
	timer   *time.Timer // of the next report that no longer counts
}

func newHealth(changed func()) *health {
	return &health{changed: changed, byDriver: map[string]*told{}}
}

// report takes over what a plugin told, unless a newer one of its driver speaks.
func (h *health) report(p *plugin, devices map[device]wellness, now time.Time) {
	h.mu.Lock()
	t := h.byDriver[p.name]
	if t == nil {
		t = &told{devices: map[device]wellness{}}
		h.byDriver[p.name] = t
	}
	if p.order < t.order {
		h.mu.Unlock()
		return
	}
	t.order = p.order
	maps.DeleteFunc(t.devices, func(d device, w wellness) bool { _, again := devices[d]; return !again && !now.Before(w.until) })
	news := false
	for d, w := range devices {
		before, had := t.devices[d]
		news = news || !had || before.status != w.status || before.message != w.message || !now.Before(before.until)
		w.until = now.Add(w.lasts)
		if _, had := t.devices[d]; had || len(t.devices) < 2*maxReported {
			t.devices[d] = w
		}
	}
	h.arm(t, now)
	h.mu.Unlock()
	if news {
		h.changed()
	}
}

// arm has changes told when the next report ends to count. The lock is held.
func (h *health) arm(t *told, now time.Time) {
	var next time.Time
	for _, w := range t.devices {
		if w.until.After(now) && (next.IsZero() || w.until.Before(next)) {
			next = w.until
		}
	}
	if t.timer != nil {
		t.timer.Stop()
	}
	if !next.IsZero() {
		t.timer = time.AfterFunc(next.Sub(now), func() {
			h.mu.Lock()
			h.arm(t, time.Now())
			h.mu.Unlock()
			h.changed()
		})
	}
}

// forget drops what a plugin told that is no more: what counts of it has been said to last, but nobody could take it back.
func (h *health) forget(p *plugin) {
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

func (h *health) of(driver string, d device, now time.Time) (v1.ResourceHealthStatus, string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if t := h.byDriver[driver]; t != nil {
		if w, ok := t.devices[d]; ok && now.Before(w.until) {
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

// message is what the status of a pod has room for.
func message(s string) string {
	const end = "..."
	if len(s) > v1.ResourceHealthMessageMaxLength {
		s = strings.ToValidUTF8(s[:v1.ResourceHealthMessageMaxLength-len(end)], "") + end
	}
	return s
}

func lasting(seconds int64) time.Duration {
	if seconds <= 0 {
		return reportLasts
	}
	return min(time.Duration(min(seconds, int64(reportMost/time.Second)))*time.Second, reportMost)
}

// entries are the records of a pod's prepared claims, by the names of the entries of spec.resourceClaims.
func (d *Devices) entries(pod *v1.Pod) map[string]*record {
	if len(pod.Spec.ResourceClaims) == 0 {
		return nil
	}
	mine, has := d.of(pod.UID), map[string]*record{}
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

// uses calls back for each prepared claim that a container names.
func uses(pod *v1.Pod, has map[string]*record, each func(container string, r *record, use v1.ResourceClaim)) {
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			for _, use := range list[i].Resources.Claims {
				if r := has[use.Name]; r != nil {
					each(list[i].Name, r, use)
				}
			}
		}
	}
}

// Health implements agent.Devices.
func (d *Devices) Health(pod *v1.Pod) map[string][]v1.ResourceStatus {
	has := d.entries(pod)
	if len(has) == 0 {
		return nil
	}
	out, now := map[string][]v1.ResourceStatus{}, time.Now()
	uses(pod, has, func(container string, r *record, use v1.ResourceClaim) {
		out[container] = append(out[container], d.status(r, use, now))
	})
	return out
}

// Claimed is what a pod's containers have of its claims, by the containers' names; of a claim that a container names more than
// once, each device is there once.
func (d *Devices) Claimed(pod *v1.Pod) map[string][]agent.ContainerClaim {
	out := map[string][]agent.ContainerClaim{}
	uses(pod, d.entries(pod), func(container string, r *record, use v1.ResourceClaim) {
		all := out[container]
		i := slices.IndexFunc(all, func(c agent.ContainerClaim) bool { return c.Name == r.Name })
		if i < 0 {
			i = len(all)
			all = append(all, agent.ContainerClaim{Namespace: r.Namespace, Name: r.Name})
		}
		for _, dev := range r.Devices {
			same := func(o agent.ClaimedDevice) bool {
				return o.Driver == dev.Driver && o.Pool == dev.Pool && o.Device == dev.Device && o.ShareID == dev.ShareID && slices.Equal(o.CDI, dev.CDI)
			}
			if dev.For(use.Request) && !slices.ContainsFunc(all[i].Devices, same) {
				all[i].Devices = append(all[i].Devices, dev)
			}
		}
		out[container] = all
	})
	return out
}

// status words the health of the devices that a container uses by one of its claims.
func (d *Devices) status(r *record, use v1.ResourceClaim, now time.Time) v1.ResourceStatus {
	s := v1.ResourceStatus{Name: v1.ResourceName("claim:" + use.Name)}
	if use.Request != "" {
		s.Name += v1.ResourceName("/" + use.Request)
	}
	for _, dev := range r.Devices {
		if dev.Driver == "" || !dev.For(use.Request) {
			continue // prepared by an agent that did not note which device it is
		}
		id := v1.ResourceID(dev.Driver + "/" + dev.Pool + "/" + dev.Device)
		if slices.ContainsFunc(s.Resources, func(h v1.ResourceHealth) bool { return h.ResourceID == id }) {
			continue
		}
		h := v1.ResourceHealth{ResourceID: id}
		var text string
		if h.Health, text = d.health.of(dev.Driver, device{dev.Pool, dev.Device}, now); text != "" {
			h.Message = &text
		}
		s.Resources = append(s.Resources, h)
	}
	return s
}
