package devices

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/await"
)

// until waits until look returns nil.
func until(t *testing.T, look func() error) {
	t.Helper()
	await.Until(t.Context(), t, await.Patience, 5*time.Millisecond, "the devices", look)
}

// following runs the part of the agent that follows drivers until the returned function is called.
func following(t *testing.T, d *Devices) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { _ = d.Run(ctx) })
	stop = func() { cancel(); done.Wait() }
	t.Cleanup(stop)
	return stop
}

func say(t *testing.T, file, lines string) {
	t.Helper()
	if err := os.WriteFile(file+".new", []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
}

// using returns a pod whose container uses a claim, and a request of it.
func using(d *Devices, t *testing.T, cluster *fake.Cluster) *v1.Pod {
	t.Helper()
	c := claimOf("c", "a.example.com")
	p := podOf("p", c)
	p.Spec.Containers = []v1.Container{{Name: "app",
		Resources: v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "c"}, {Name: "c", Request: "r"},
			{Name: "c", Request: "other"}}}}, {Name: "none"}}
	cluster.Put(c)
	if _, err := d.Prepare(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return p
}

func healthOf(d *Devices, p *v1.Pod) string {
	var out []string
	for c, list := range d.Health(p) {
		for _, s := range list {
			out = append(out, c+" "+string(s.Name))
			for _, r := range s.Resources {
				message := ptr.Deref(r.Message, "")
				out = append(out, fmt.Sprintf("%s=%s %q", r.ResourceID, r.Health, message))
			}
		}
	}
	return strings.Join(out, ", ")
}

func saying(d *Devices, p *v1.Pod, health, message string) func() error {
	one := fmt.Sprintf("a.example.com/w1/gpu-0=%s %q", health, message)
	return func() error {
		if got, want := healthOf(d, p), "app claim:c, "+one+", app claim:c/r, "+one+", app claim:c/other"; got != want {
			return fmt.Errorf("%s, want %s", got, want)
		}
		return nil
	}
}

// The health that a driver reports is available for the pods that have its devices. The newest
// supported version of the service is used, also after a restart of the agent. Health is unknown
// for devices without a report and when the driver is gone.
func TestHealth(t *testing.T) {
	for services, method := range map[string]string{"": "/v1alpha1.", "v1alpha1.DRAResourceHealth": "/v1alpha1.",
		"v1alpha1.DRAResourceHealth,v1.DRAResourceHealth": "/v1."} {
		t.Run(services, func(t *testing.T) {
			dir, state, cluster := short(t), t.TempDir(), fake.NewCluster()
			file := filepath.Join(dir, "health")
			say(t, file, "gpu-1 UNHEALTHY 0 not this one\n")
			kill := spawn(t, dir, "a.example.com", "", "--health="+file, "--services="+services)
			d := New(Config{Registration: dir, State: state, Objects: cluster})
			p := using(d, t, cluster)
			stop := following(t, d)
			until(t, saying(d, p, "Unknown", ""))
			if got := fmt.Sprintf("%+v", d.ContainerClaims(p)); got !=
				"map[app:[{Namespace:ns Name:c Devices:[{Requests:[r] CDI:[a.example.com/gpu=uid-c] "+
					"Driver:a.example.com Pool:w1 Device:gpu-0 ShareID:}]}]]" {
				t.Errorf("the pod has %s", got)
			}
			say(t, file, "gpu-0 HEALTHY 3600\n")
			until(t, saying(d, p, "Healthy", ""))
			news := d.Changes(t.Context())
			say(t, file, "gpu-0 UNHEALTHY 3600 the fan is broken\n")
			until(t, saying(d, p, "Unhealthy", "the fan is broken"))
			select {
			case <-news:
			case <-t.Context().Done():
			}
			if log := strings.Join(logOf(t, dir, "a.example.com"), "\n"); strings.Count(log, "watch ") != 1 ||
				!strings.Contains(log, "watch "+method) {
				t.Errorf("the driver was asked %s", log)
			}
			stop()
			d = New(Config{Registration: dir, State: state, Objects: cluster})
			following(t, d)
			until(t, saying(d, p, "Unhealthy", "the fan is broken"))
			until(t, func() error { // the first report may be read before the connection state is updated
				if got := d.Drivers(); !slices.Equal(got, []string{"a.example.com"}) {
					return fmt.Errorf("drivers %v", got)
				}
				return nil
			})
			kill()
			until(t, func() error {
				if got := d.Drivers(); len(got) > 0 {
					return fmt.Errorf("drivers %v", got)
				}
				return nil
			})
			d.folder.Scan(t.Context())
			until(t, saying(d, p, "Unknown", ""))
		})
	}
}

// A driver without the health service is queried once; the health of its devices is unknown.
func TestHealthIsNotTold(t *testing.T) {
	dir, cluster := short(t), fake.NewCluster()
	spawn(t, dir, "a.example.com", "")
	var log bytes.Buffer
	d := New(Config{Registration: dir, State: t.TempDir(), Objects: cluster,
		Log: slog.New(slog.NewTextHandler(&log, nil))})
	p := using(d, t, cluster)
	stop := following(t, d)
	until(t, func() error {
		if len(d.Drivers()) == 0 {
			return errors.New("no drivers")
		}
		return saying(d, p, "Unknown", "")()
	})
	stop()
	if strings.Contains(log.String(), "level=WARN") {
		t.Errorf("the log: %s", log.String())
	}
}

// Reports that exceed a limit are ignored, and the driver's stream is opened again; other drivers
// are not affected. A driver that sends too many reports must wait.
func TestHostileHealth(t *testing.T) {
	for mode, want := range map[string]string{"health-floods": "a report of 5000 devices: 4096 at most",
		"health-huge":     "received message larger than max",
		"health-nameless": "a report of a device without a pool or a name"} {
		t.Run(mode, func(t *testing.T) {
			dir, cluster := short(t), fake.NewCluster()
			spawn(t, dir, "a.example.com", mode, "--health=x", "--services="+drahealth.DRAResourceHealthService)
			lines := make(lineLog, 64)
			d := New(Config{Registration: dir, State: t.TempDir(), Objects: cluster,
				Log: slog.New(slog.NewTextHandler(lines, nil))})
			p := using(d, t, cluster)
			following(t, d)
			for !strings.Contains(<-lines, want) {
			}
			if err := saying(d, p, "Unknown", "")(); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("health-raves", func(t *testing.T) {
		dir, cluster := short(t), fake.NewCluster()
		began := time.Now()
		spawn(t, dir, "a.example.com", "health-raves", "--health=x", "--services="+drahealth.DRAResourceHealthService)
		d := New(Config{Registration: dir, State: t.TempDir(), Objects: cluster})
		p := using(d, t, cluster)
		following(t, d)
		until(t, func() error {
			s := d.Health(p)["app"][0].Resources[0]
			if s.Message == nil || *s.Message == "" {
				return errors.New("nothing is told")
			}
			return nil
		})
		news := d.Changes(t.Context())
		for range 3 {
			<-news
		}
		// A burst of ten, and one more per second: only the maximum is checked, because a slow
		// machine may process fewer.
		var n int
		if _, err := fmt.Sscan(*d.Health(p)["app"][0].Resources[0].Message, &n); err != nil ||
			n > reportBurst+3+int(time.Since(began)/reportEvery)+30 {
			t.Errorf("%d reports were read, %v", n, err)
		}
	})
}

// lineLog passes log lines on; lines that nobody reads are lost.
type lineLog chan string

func (l lineLog) Write(b []byte) (int, error) {
	select {
	case l <- string(b):
	default:
	}
	return len(b), nil
}

// A report is valid for its stated time, for thirty seconds by default, and for at most a day. A
// device that the next report omits keeps its health until then. A report of an older plugin after
// one of a newer plugin is ignored.
func TestReports(t *testing.T) {
	h := newHealth(func() {})
	old, newer := &driverPlugin{name: "d", order: 1}, &driverPlugin{name: "d", order: 2}
	begin := time.Now().Add(1000 * time.Hour) // no timer fires
	at := func(s int) time.Time { return begin.Add(time.Duration(s) * time.Second) }
	report := func(p *driverPlugin, second int, devices ...*drahealth.DeviceHealth) {
		t.Helper()
		j, err := parseHealth(devices)
		if err != nil {
			t.Fatal(err)
		}
		h.setReport(p, j, at(second))
	}
	dev := func(name string, s drahealth.HealthStatus, seconds int64) *drahealth.DeviceHealth {
		return &drahealth.DeviceHealth{Device: &drahealth.DeviceIdentifier{PoolName: "p", DeviceName: name}, Health: s,
			HealthCheckTimeoutSeconds: seconds}
	}
	is := func(name string, second int, want v1.ResourceHealthStatus) {
		t.Helper()
		if got, _ := h.deviceHealthAt("d", deviceID{"p", name}, at(second)); got != want {
			t.Errorf("%s after %d s is %s, want %s", name, second, got, want)
		}
	}
	report(old, 0, dev("a", drahealth.HealthStatus_HEALTHY, 0), dev("b", drahealth.HealthStatus_UNHEALTHY, 100),
		dev("c", drahealth.HealthStatus_HEALTHY, -5),
		dev("d", drahealth.HealthStatus_HEALTHY, 1<<62), dev("e", drahealth.HealthStatus_UNKNOWN, 100),
		dev("f", 77, 100))
	is("a", 29, v1.ResourceHealthStatusHealthy)
	is("a", 30, v1.ResourceHealthStatusUnknown)
	is("b", 99, v1.ResourceHealthStatusUnhealthy)
	is("b", 100, v1.ResourceHealthStatusUnknown)
	is("c", 29, v1.ResourceHealthStatusHealthy)
	is("c", 30, v1.ResourceHealthStatusUnknown)
	is("d", 24*3600-1, v1.ResourceHealthStatusHealthy)
	is("d", 24*3600, v1.ResourceHealthStatusUnknown)
	is("e", 1, v1.ResourceHealthStatusUnknown)
	is("f", 1, v1.ResourceHealthStatusUnknown)
	report(newer, 10, dev("a", drahealth.HealthStatus_UNHEALTHY, 0))
	is("a", 39, v1.ResourceHealthStatusUnhealthy)
	is("b", 99, v1.ResourceHealthStatusUnhealthy)
	report(old, 11, dev("a", drahealth.HealthStatus_HEALTHY, 0))
	is("a", 39, v1.ResourceHealthStatusUnhealthy)
	h.removePlugin(old)
	is("a", 39, v1.ResourceHealthStatusUnhealthy)
	h.removePlugin(newer)
	is("a", 12, v1.ResourceHealthStatusUnknown)
	if m := truncateMessage(strings.Repeat("ä", 2000)); len(m) > v1.ResourceHealthMessageMaxLength ||
		!strings.HasSuffix(m, "ä...") {
		t.Errorf("%d bytes, ends with %q", len(m), m[len(m)-8:])
	}
}

// A device that was prepared by an agent that did not store its name is omitted; all others are
// reported correctly.
func TestHealthOfOldRecords(t *testing.T) {
	d := New(Config{State: t.TempDir(), Objects: fake.NewCluster()})
	r := &claimRecord{Version: recordVersion, Namespace: "ns", Name: "c", UID: "uid-c", Pods: nil, Prepared: true,
		Devices: []agent.ClaimedDevice{{CDI: []string{"a/b=c"}}}}
	c := claimOf("c", "a.example.com")
	p := podOf("p", c)
	p.Spec.Containers = []v1.Container{{Name: "app",
		Resources: v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "c"}}}}}
	if err := d.records.writeRecord(d.records.recordPath(r.UID), r); err != nil {
		t.Fatal(err)
	}
	if h := d.Health(p); h != nil {
		t.Errorf("of a pod without devices: %v", h)
	}
	r.Pods = append(r.Pods, p.UID)
	if err := d.records.writeRecord(d.records.recordPath(r.UID), r); err != nil {
		t.Fatal(err)
	}
	if got := healthOf(d, p); got != "app claim:c" {
		t.Errorf("health %s", got)
	}
}
