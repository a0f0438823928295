package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"pgregory.net/rapid"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/virtual"
)

// app is a program with probes in virtual time. It returns the set result for each kind of probe.
type app struct {
	mu    sync.Mutex
	start time.Time
	ok    map[string]func(age time.Duration) bool
	calls []string
}

func (a *app) runProbe(_ context.Context, p *v1.Probe, t agent.ProbeTarget) (bool, string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	kind := Readiness
	switch p {
	case t.Container.StartupProbe:
		kind = Startup
	case t.Container.LivenessProbe:
		kind = Liveness
	}
	age := time.Since(a.start)
	a.calls = append(a.calls, fmt.Sprintf("%s@%s", kind, age))
	if f := a.ok[kind]; f != nil && !f(age) {
		return false, "no", nil
	}
	return true, "", nil
}

func passAfter(d time.Duration) func(time.Duration) bool {
	return func(age time.Duration) bool { return age >= d }
}

func (a *app) eventsOf(kind string) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []string
	for _, c := range a.calls {
		if s, ok := strings.CutPrefix(c, kind+"@"); ok {
			out = append(out, s)
		}
	}
	return out
}

// observeProbes runs the probes for a duration and returns the state changes with the container's
// age.
func observeProbes(t *testing.T, a *app, c *v1.Container, resume *agent.ProbeState, d time.Duration) (log []string) {
	a.start = time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	var last agent.ProbeState
	done := make(chan struct{})
	go func() {
		defer close(done)
		New(Config{Ask: a.runProbe}).Watch(ctx, agent.ProbeTarget{Pod: &v1.Pod{}, Container: c, StartedAt: a.start,
			Resume: resume}, func(e agent.ProbeEvent) {
			if e.Probe == "" || e.State != last {
				log = append(log, fmt.Sprintf("%s started=%t ready=%t%s", time.Since(a.start), e.State.Started,
					e.State.Ready, e.State.FailedProbe))
			}
			last = e.State
		})
	}()
	time.Sleep(d) // virtual time
	cancel()
	<-done
	return log
}

// F112: no liveness or readiness probe runs before the startup probe has succeeded.
func TestStartupGates(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		a := &app{ok: map[string]func(time.Duration) bool{Startup: passAfter(7 * time.Second)}}
		c := &v1.Container{StartupProbe: &v1.Probe{PeriodSeconds: 2, FailureThreshold: 5}, ReadinessProbe: &v1.Probe{},
			LivenessProbe: &v1.Probe{}}
		log := observeProbes(t, a, c, nil, 30*time.Second)
		want := []string{"0s started=false ready=false", "8.002s started=true ready=false",
			"8.002s started=true ready=true"}
		if !slices.Equal(log, want) {
			t.Errorf("states: %q", log)
		}
		if r, l := a.eventsOf(Readiness), a.eventsOf(Liveness); r[0] != "8.002s" || l[0] != "8.002s" {
			t.Errorf("readiness first at %s, liveness at %s", r[0], l[0])
		}
		if s := a.eventsOf(Startup); s[len(s)-1] != "8.002s" {
			t.Errorf("the startup probe went on after it had passed: %q", s)
		}
	})
}

// A startup probe fails after failureThreshold periods, however many quick attempts the first
// period had.
func TestStartupGivesUp(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		a := &app{ok: map[string]func(time.Duration) bool{Startup: passAfter(time.Hour)}}
		log := observeProbes(t, a, &v1.Container{StartupProbe: &v1.Probe{PeriodSeconds: 10, FailureThreshold: 3}},
			nil, time.Minute)
		if want := []string{"0s started=false ready=false",
			"30.002s started=false ready=falsestartup"}; !slices.Equal(log, want) {
			t.Errorf("states: %q", log)
		}
	})
}

// F113, F120: the first readiness probe runs at once and is repeated quickly until it succeeds,
// then once per period.
func TestReadinessIsQuick(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		a := &app{ok: map[string]func(time.Duration) bool{Readiness: passAfter(45 * time.Millisecond)}}
		log := observeProbes(t, a, &v1.Container{ReadinessProbe: &v1.Probe{PeriodSeconds: 5}}, nil, 12*time.Second)
		if want := []string{"0s started=true ready=false", "66.34375ms started=true ready=true"}; !slices.Equal(log,
			want) {
			t.Errorf("states: %q", log)
		}
		want := []string{"2ms", "4ms", "7ms", "11.5ms", "18.25ms", "28.375ms", "43.5625ms", "66.34375ms", "5.06634375s",
			"10.06634375s"}
		if got := a.eventsOf(Readiness); !slices.Equal(got, want) {
			t.Errorf("probes at %q, want %q", got, want)
		}
	})
}

// F113: the cost of the quick phase is bounded: about two dozen attempts in the first period, and
// fewer for exec probes.
func TestQuickIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		handler v1.ProbeHandler
		most    int
	}{"http": {v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{}}, 24},
		"exec": {v1.ProbeHandler{Exec: &v1.ExecAction{}}, 12}} {
		virtual.Test(t, func(t *testing.T) {
			a := &app{ok: map[string]func(time.Duration) bool{Readiness: passAfter(time.Hour)}}
			observeProbes(t, a, &v1.Container{ReadinessProbe: &v1.Probe{ProbeHandler: c.handler, PeriodSeconds: 10}},
				nil, 10*time.Second)
			if n := len(a.eventsOf(Readiness)); n > c.most || n < 5 {
				t.Errorf("%s: %d tries in the first period, at %q", name, n, a.eventsOf(Readiness))
			}
		})
	}
}

// F113: readiness is lost after failureThreshold consecutive failures, and returns after
// successThreshold successes.
func TestReadinessThresholds(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		a := &app{ok: map[string]func(time.Duration) bool{Readiness: func(age time.Duration) bool {
			return age < 10*time.Second || age > 20*time.Second
		}}}
		log := observeProbes(t, a,
			&v1.Container{ReadinessProbe: &v1.Probe{PeriodSeconds: 1, FailureThreshold: 3, SuccessThreshold: 2}},
			nil, time.Minute)
		want := []string{"0s started=true ready=false", "1.002s started=true ready=true",
			"12.002s started=true ready=false", "21.002s started=true ready=true"}
		if !slices.Equal(log, want) {
			t.Errorf("states: %q", log)
		}
	})
}

// F114: the liveness probe runs once per period, not before minLivenessAge, and fails after
// failureThreshold.
func TestLiveness(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		a := &app{ok: map[string]func(time.Duration) bool{Liveness: func(age time.Duration) bool {
			return age < 25*time.Second
		}}}
		log := observeProbes(t, a, &v1.Container{LivenessProbe: &v1.Probe{PeriodSeconds: 10, FailureThreshold: 3}},
			nil, time.Minute)
		if want := []string{"0s started=true ready=true", "51s started=true ready=trueliveness"}; !slices.Equal(log,
			want) {
			t.Errorf("states: %q", log)
		}
		if got, want := a.eventsOf(Liveness), []string{"1s", "11s", "21s", "31s", "41s",
			"51s"}; !slices.Equal(got, want) {
			t.Errorf("probes at %q", got)
		}
	})
}

// P9: after a restart of the agent a container keeps its readiness.
func TestResume(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		a := &app{}
		c := &v1.Container{StartupProbe: &v1.Probe{}, ReadinessProbe: &v1.Probe{InitialDelaySeconds: 5}}
		log := observeProbes(t, a, c, &agent.ProbeState{Started: true, Ready: true}, 3*time.Second)
		if want := []string{"0s started=true ready=true"}; !slices.Equal(log, want) {
			t.Errorf("states: %q", log)
		}
		if n := len(a.eventsOf(Startup)); n != 0 {
			t.Errorf("%d startup probes of a started container", n)
		}
	})
}

// For any series of results, the state becomes failing only after failureThreshold counted
// consecutive failures, and the next probe is never in the past.
func TestMachineAgainstCounting(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		kind := rapid.SampledFrom([]string{Startup, Liveness, Readiness}).Draw(r, "kind")
		p := &v1.Probe{PeriodSeconds: int32(rapid.IntRange(0, 5).Draw(r, "period")),
			FailureThreshold: int32(rapid.IntRange(0, 4).Draw(r, "failures")), SuccessThreshold: 1,
			InitialDelaySeconds: int32(rapid.IntRange(0, 3).Draw(r, "delay"))}
		if kind == Readiness {
			p.SuccessThreshold = int32(rapid.IntRange(1, 3).Draw(r, "successes"))
		}
		start := time.Unix(1000, 0)
		m := newStateMachine(kind, p, start, start, kind == Liveness)
		if m.next.Before(start.Add(time.Duration(p.InitialDelaySeconds) * time.Second)) {
			r.Fatalf("first probe before the initial delay")
		}
		good, bad, now := 0, 0, start
		for range rapid.IntRange(1, 40).Draw(r, "probes") {
			if m.next.Before(now) {
				r.Fatalf("next probe %s before %s", m.next, now)
			}
			now = m.next.Add(time.Duration(rapid.IntRange(0, 900).Draw(r, "took")) * time.Millisecond)
			was := m.passing
			o := probeResult(rapid.IntRange(0, 2).Draw(r, "result"))
			changed, quick := m.addResult(o, now)
			switch {
			case o == resultSuccess:
				good, bad = good+1, 0
			case o == resultFailure && quick:
				good = 0
			case o == resultFailure:
				good, bad = 0, bad+1
			}
			if changed && was && bad < m.failureThreshold {
				r.Fatalf("failed after %d failures of %d", bad, m.failureThreshold)
			}
			if changed && m.passing && good < m.successThreshold {
				r.Fatalf("passed after %d successes of %d", good, m.successThreshold)
			}
			if m.gaveUp {
				return
			}
		}
	})
}

func newTarget(t *testing.T, addr string) (agent.ProbeTarget, int) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	n, err := net.LookupPort("tcp", port)
	if err != nil {
		t.Fatal(err)
	}
	return agent.ProbeTarget{Pod: &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web"}}, IP: host,
		Container: &v1.Container{Name: "app", Ports: []v1.ContainerPort{{Name: "web", ContainerPort: int32(n)}}}}, n
}

func TestHTTP(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/header":
			if r.Header.Get("X-Probe") != "yes" || r.Host != "inner.example" ||
				!strings.HasPrefix(r.UserAgent(), "kube-probe/") {
				w.WriteHeader(http.StatusBadRequest)
			}
		case "/bad":
			w.WriteHeader(http.StatusInternalServerError)
		case "/moved":
			http.Redirect(w, r, "/bad", http.StatusFound)
		case "/away":
			http.Redirect(w, r, "http://elsewhere.invalid/", http.StatusFound)
		case "/slow":
			<-r.Context().Done()
		}
	}))
	defer s.Close()
	tg, _ := newTarget(t, s.Listener.Addr().String())
	a := newProbeRunner(nil)
	for path, want := range map[string]string{
		"/": "", "/query?a=b": "", "/header": "", "/away": "", "/bad": "HTTP probe failed with statuscode: 500",
		"/moved": "HTTP probe failed with statuscode: 500", "/slow": "context deadline exceeded",
	} {
		ctx, cancel := context.WithCancel(t.Context()) // retried until the server responds
		if path == "/slow" {
			ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
		}
		p :=
			&v1.Probe{ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: path,
				Port: intstr.FromString("web"), HTTPHeaders: []v1.HTTPHeader{{Name: "X-Probe", Value: "yes"},
					{Name: "Host", Value: "inner.example"}}}}}
		ok, msg, err := a.runProbe(ctx, p, tg)
		cancel()
		if path == "/away" { // Kubernetes counts it as a success with a warning
			want := probeWarning("Probe terminated redirects, Response body: <a " +
				"href=\"http://elsewhere.invalid/\">Found</a>.\n\n")
			if !ok || msg != "" || err != error(want) {
				t.Errorf("%s: %t %q %v", path, ok, msg, err)
			}
			continue
		}
		if err != nil || ok != (want == "") || !strings.Contains(msg, want) {
			t.Errorf("%s: %t %q %v", path, ok, msg, err)
		}
	}
	tls := httptest.NewTLSServer(http.NotFoundHandler())
	defer tls.Close()
	tg, n := newTarget(t, tls.Listener.Addr().String())
	p :=
		&v1.Probe{ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Scheme: v1.URISchemeHTTPS,
			Port: intstr.FromInt32(int32(n))}}}
	if ok, msg, err := a.runProbe(t.Context(), p, tg); ok || err != nil ||
		msg != "HTTP probe failed with statuscode: 404" {
		t.Errorf("https: %t %q %v", ok, msg, err)
	}
	p.HTTPGet.Port = intstr.FromString("absent")
	if _, _, err := a.runProbe(t.Context(), p, tg); err == nil || !strings.Contains(err.Error(), "absent") {
		t.Errorf("a port that has no such name: %v", err)
	}
}

func TestTCPAndGRPC(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, h := grpc.NewServer(), health.NewServer()
	h.SetServingStatus("broken", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	grpc_health_v1.RegisterHealthServer(s, h)
	go func() { _ = s.Serve(l) }()
	tg, n := newTarget(t, l.Addr().String())
	a := newProbeRunner(nil)
	broken := "broken"
	tcp := &v1.Probe{ProbeHandler: v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(int32(n))}}}
	rpc := &v1.Probe{ProbeHandler: v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: int32(n)}}}
	bad := &v1.Probe{ProbeHandler: v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: int32(n), Service: &broken}}}
	check := func(name string, p *v1.Probe, wantOK bool, want string) {
		t.Helper()
		if ok, msg, err := a.runProbe(t.Context(), p, tg); err != nil || ok != wantOK || !strings.Contains(msg, want) {
			t.Errorf("%s: %t %q %v", name, ok, msg, err)
		}
	}
	check("tcp", tcp, true, "")
	check("grpc", rpc, true, "")
	check("grpc, not serving", bad, false, `service unhealthy (responded with "NOT_SERVING")`)
	s.Stop()
	check("tcp after the end", tcp, false, "connection refused")
	check("grpc after the end", rpc, false, "error: health rpc failed")
}

func TestExec(t *testing.T) {
	rt := &fake.Runtime{}
	sb, err := rt.RunPodSandbox(t.Context(),
		&cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Uid: "u1"}}})
	if err != nil {
		t.Fatal(err)
	}
	c, err := rt.CreateContainer(t.Context(),
		&cri.CreateContainerRequest{PodSandboxId: sb.PodSandboxId,
			Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "app"}, Image: &cri.ImageSpec{}}})
	if err != nil {
		t.Fatal(err)
	}
	tg := agent.ProbeTarget{Container: &v1.Container{Name: "app"}, ContainerID: c.ContainerId}
	p := &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"check", "me"}}}}
	a := newProbeRunner(rt)
	for name, r := range map[string]struct {
		code int32
		err  error
		ok   bool
		msg  string
		bad  bool
	}{
		"passes":     {ok: true, msg: "out"},
		"fails":      {code: 3, msg: "out"},
		"times out":  {err: context.DeadlineExceeded, msg: `command timed out: "check me" timed out after 1s`},
		"cannot run": {err: errors.New("no shim"), bad: true},
	} {
		rt.OnExec = func(*cri.ContainerConfig, []string) (string, int32, error) { return "out", r.code, r.err }
		if ok, msg, err := a.runProbe(t.Context(), p, tg); ok != r.ok || msg != r.msg || (err != nil) != r.bad {
			t.Errorf("%s: %t %q %v", name, ok, msg, err)
		}
	}
}

// A container that started in the future by the wall clock is probed like one that started now.
func TestProbesIgnoreTheWallClock(t *testing.T) {
	for _, skew := range []time.Duration{time.Hour, 24 * time.Hour} {
		virtual.Test(t, func(t *testing.T) {
			rt := &fake.Runtime{}
			asked := make(chan time.Time, 1)
			rt.OnExec = func(*cri.ContainerConfig, []string) (string, int32, error) {
				select {
				case asked <- time.Now():
				default:
				}
				return "", 0, nil
			}
			begin := time.Now()
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			spec := &v1.Container{Name: "app", ReadinessProbe: &v1.Probe{InitialDelaySeconds: 7,
				ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"x"}}}}}
			p := New(Config{Runtime: execOnly{rt}})
			go func() {
				defer close(done)
				p.Watch(ctx, agent.ProbeTarget{Pod: &v1.Pod{}, Container: spec, ContainerID: "c",
					StartedAt: begin.Add(skew).Round(0)}, func(agent.ProbeEvent) {})
			}()
			select {
			case at := <-asked:
				if took := at.Sub(begin); took != 7*time.Second {
					t.Errorf("stamped %s ahead: first asked after %s", skew, took)
				}
			case <-time.After(30 * time.Second):
				t.Errorf("stamped %s ahead: never asked", skew)
			}
			cancel()
			<-done
		})
	}
}

// execOnly runs ExecSync for a container that does not exist.
type execOnly struct{ *fake.Runtime }

func (e execOnly) ExecSync(context.Context, *cri.ExecSyncRequest) (*cri.ExecSyncResponse, error) {
	_, code, err := e.OnExec(nil, nil)
	return &cri.ExecSyncResponse{ExitCode: code}, err
}

// A probe with a warning counts as a success, and each of its results is reported with the warning.
func TestWarningCountsAsSuccess(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ask := func(context.Context, *v1.Probe, agent.ProbeTarget) (bool, string, error) {
			return true, "", probeWarning("moved away")
		}
		c := &v1.Container{Name: "main", ReadinessProbe: &v1.Probe{PeriodSeconds: 10}}
		warned := 0
		New(Config{Ask: ask}).Watch(ctx, agent.ProbeTarget{Pod: &v1.Pod{}, Container: c, StartedAt: time.Now()},
			func(e agent.ProbeEvent) {
				if e.Probe == "" {
					return
				}
				if !e.OK || !e.State.Ready || e.Warning != "moved away" {
					t.Errorf("event %+v", e)
				}
				if warned++; warned == 3 {
					cancel()
				}
			})
		if warned < 3 {
			t.Errorf("%d warnings", warned)
		}
	})
}
