package fault

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/fault/chaos"
	"keelson.dev/keelson/test/testenv"
	"keelson.dev/keelson/test/testenv/stream"
)

var (
	chaosFor  = flag.Duration("chaos.for", 20*time.Second, "for about how long TestChaos takes leaders away")
	chaosSeed = flag.Uint64("chaos.seed", 1, "of its plan: the same seed and time make the same plan")
)

const (
	chaosCall    = 20 * time.Second // more than any fault lasts: calls wait for a leader
	replaceLimit = 10 * time.Second // beyond the time that a fault is held: for a machine that does other work
	rolloutLimit = 3 * time.Minute
	requestPace  = 10 * time.Millisecond
)

// F48 F54 F94 F127: leaders are killed, frozen, cut off and transferred, by a plan that follows
// from a seed. No call at another replica fails, no acknowledged write is lost, no read is stale,
// each watch delivers the same history, rollouts complete, and no request to a Service fails.
func TestChaos(t *testing.T) {
	awaitVoters(t)
	awaitReplicas(t)
	plan := chaos.New(*chaosSeed, *chaosFor)
	t.Logf("to have this again: make chaos SEED=%d DURATION=%s\n%s", *chaosSeed, *chaosFor, plan)
	ns := testenv.Namespace(t)
	ctx, end := context.WithCancel(context.Background())
	load := &stream.Load{Names: testenv.Replicas(), Clients: map[string]kubernetes.Interface{}, Namespace: ns,
		Call: chaosCall}
	for _, r := range load.Names {
		load.Clients[r] = testenv.ClientAt(t, r)
	}
	served, rolled := &serviceRequests{}, &rolloutLoop{load: load, ns: ns}
	served.deployWeb(t, ns)
	rolled.deployWeb(t)
	defer load.Wait()
	var beside sync.WaitGroup
	defer beside.Wait()
	defer end()
	if err := load.Start(ctx); err != nil {
		t.Fatal(err)
	}
	calm, stop := context.WithCancel(ctx)
	defer stop()
	for _, w := range []string{"w1", "w2"} {
		beside.Go(func() { served.sendFrom(t, calm, w) })
	}
	beside.Go(func() { rolled.runUntil(t, calm) })

	gaps := map[chaos.Fault][]float64{}
	var seen stream.Result
	defer func() { // whatever ended it
		stop()
		beside.Wait()
		logChaos(t, gaps, load, seen, served, rolled)
	}()
	for _, a := range plan {
		gap := applyFault(t, load, a)
		gaps[a.Fault] = append(gaps[a.Fault], float64(gap.Microseconds())/1000)
	}
	stop()
	beside.Wait()
	var err error
	if seen, err = load.Finish(ctx); err == nil {
		err = seen.Err()
	}
	if err != nil {
		t.Error(err)
	}
}

// applyFault does one act to the leader, and returns when everything is whole: for how long nothing was written. Another replica
// is to lead, and to take writes, while the fault lasts.
func applyFault(t *testing.T, load *stream.Load, a chaos.Act) time.Duration {
	t.Helper()
	if err := wait.Delay(t.Context(), a.Rest); err != nil {
		t.Fatal(err)
	}
	victim, _ := leaderAndOthers(t)
	if a.Fault != chaos.HandOver {
		load.ExpectLoss(victim)
	}
	from := time.Now()
	undo := func(context.Context, string) error { return nil }
	switch a.Fault {
	case chaos.Kill:
		forHosts(t, testenv.Lab().KillDaemon, victim)
		undo = testenv.Lab().Restart
	case chaos.Freeze:
		forHosts(t, func(_ context.Context, h string) error { return testenv.Lab().Pause(h) }, victim)
		undo = func(_ context.Context, h string) error { return testenv.Lab().Resume(h) }
	case chaos.CutOff:
		forHosts(t, func(_ context.Context, h string) error { return testenv.Lab().Partition(h) }, victim)
		undo = func(_ context.Context, h string) error { return testenv.Lab().Heal(h) }
	case chaos.HandOver:
		testenv.Eventually(t, soon, func() error { // the target of the transfer may lag behind briefly
			out, err := runKctl(t, "cluster", "step-down")
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
	}
	healed := false
	defer func() {
		if !healed { // the test is about to fail: the next one wants a whole lab
			_ = undo(context.Background(), victim)
		}
	}()
	if err := wait.Delay(t.Context(), a.Hold); err != nil {
		t.Fatal(err)
	}
	replaced, cancel := context.WithTimeout(t.Context(), replaceLimit)
	err := wait.For(replaced, requestPace, func() error {
		if !load.HasWrittenSince(from) {
			return errors.New("no write has been started and acknowledged since")
		}
		return nil
	})
	cancel()
	gap := load.LongestPause(from)
	if err != nil {
		t.Errorf("no other replica leads in place of %s, %s after %s: %v", victim,
			time.Since(from).Round(time.Millisecond), a.Fault, err)
	}
	healed = true
	forHosts(t, undo, victim)
	awaitVoters(t)
	awaitReplicas(t)
	load.ExpectLoss("")
	t.Logf("%s of %s: nothing written for %s", a.Fault, victim, gap.Round(time.Millisecond))
	return gap
}

// serviceRequests sends requests to a Service continuously.
type serviceRequests struct {
	url string

	mu        sync.Mutex
	latencies []float64
	failed    int
}

func (r *serviceRequests) deployWeb(t *testing.T, ns string) {
	t.Helper()
	applyText(t, ns, deployment)
	testenv.Kctl(t, "-n", ns, "rollout", "status", "deployment/web", "--timeout=180s")
	svc, err := testenv.Client(t).CoreV1().Services(ns).Get(context.Background(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r.url = "http://" + net.JoinHostPort(svc.Spec.ClusterIP, "80") + "/"
	for _, w := range []string{"w1", "w2"} {
		testenv.Eventually(t, soon, func() error { return fetchPage(testenv.HTTP(testenv.Host(t, w)), r.url) })
	}
}

func (r *serviceRequests) sendFrom(t *testing.T, ctx context.Context, worker string) {
	web := testenv.PatientHTTP(testenv.Host(t, worker))
	for wait.Delay(ctx, requestPace) == nil {
		began := time.Now()
		err := fetchPage(web, r.url)
		r.mu.Lock()
		r.latencies = append(r.latencies, float64(time.Since(began).Microseconds())/1000)
		if err != nil {
			r.failed++
			t.Errorf("a request to a Service from %s after %s: %v", worker,
				time.Since(began).Round(time.Millisecond), err)
		}
		r.mu.Unlock()
	}
}

// rolloutLoop runs rollouts one after the other.
type rolloutLoop struct {
	load *stream.Load
	ns   string
	took []float64 // seconds
}

func (r *rolloutLoop) deployWeb(t *testing.T) {
	t.Helper()
	applyText(t, r.ns, strings.NewReplacer("name: web", "name: rolled", "app: web", "app: rolled").Replace(
		strings.Split(deployment, "---")[0]))
	testenv.Kctl(t, "-n", r.ns, "rollout", "status", "deployment/rolled", "--timeout=180s")
}

// runUntil changes the template and waits for the rollout, repeatedly until ctx ends. The last
// rollout still completes.
func (r *rolloutLoop) runUntil(t *testing.T, ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		began := time.Now()
		limited, cancel := context.WithTimeout(context.Background(), rolloutLimit)
		err := r.rollOut(limited, n)
		cancel()
		if err != nil {
			t.Errorf("rollout %d has not completed after %s: %v", n+1, time.Since(began).Round(time.Second), err)
			return
		}
		r.took = append(r.took, time.Since(began).Seconds())
	}
}

// rollOut runs one rollout, through any replica that responds.
func (r *rolloutLoop) rollOut(ctx context.Context, n int) error {
	at, changed := 0, int64(0)
	body := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"round":"%d"}}}}}`, n)
	return wait.For(ctx, 20*time.Millisecond, func() (err error) {
		call, cancel := context.WithTimeout(ctx, 2*time.Second) // a frozen replica does not respond
		defer cancel()
		defer func() {
			if err != nil && call.Err() != nil || changed == 0 {
				at = (at + 1) % len(r.load.Names)
			}
		}()
		all := r.load.Clients[r.load.Names[at]].AppsV1().Deployments(r.ns)
		if changed == 0 {
			d, err := all.Patch(call, "rolled", types.MergePatchType, body, metav1.PatchOptions{})
			if err != nil {
				return err
			}
			changed = d.Generation
		}
		d, err := all.Get(call, "rolled", metav1.GetOptions{})
		if err != nil {
			at = (at + 1) % len(r.load.Names)
			return err
		}
		s := d.Status
		if s.ObservedGeneration < changed || s.UpdatedReplicas < *d.Spec.Replicas ||
			s.ReadyReplicas < *d.Spec.Replicas || s.Replicas > *d.Spec.Replicas {
			return fmt.Errorf("generation %d of %d is observed, %d of %d pods are new, %d ready, %d in all",
				s.ObservedGeneration, changed, s.UpdatedReplicas, *d.Spec.Replicas, s.ReadyReplicas, s.Replicas)
		}
		return nil
	})
}

func applyText(t *testing.T, ns, text string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "m.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	testenv.Kctl(t, "-n", ns, "apply", "-f", path)
}

// logChaos prints the measurements.
func logChaos(
	t *testing.T, gaps map[chaos.Fault][]float64, load *stream.Load, seen stream.Result, served *serviceRequests,
	rolled *rolloutLoop,
) {
	t.Helper()
	var b strings.Builder
	line := func(what string, unit string, values []float64) {
		if len(values) == 0 {
			return
		}
		v := slices.Clone(values)
		fmt.Fprintf(&b, "%-34s %6d  p50 %8s  p99 %8s  max %8s\n", what, len(v),
			figures.Format(figures.Quantile(v, 0.5), unit), figures.Format(figures.Quantile(v, 0.99), unit),
			figures.Format(figures.Quantile(v, 1), unit))
	}
	for _, f := range chaos.Faults {
		line("no write after: "+string(f), "ms", gaps[f])
	}
	var calls []float64
	for _, d := range load.Latencies() {
		calls = append(calls, float64(d.Microseconds())/1000)
	}
	line("calls at other replicas", "ms", calls)
	line("requests to a Service", "ms", served.latencies)
	line("rollouts", "s", rolled.took)
	fmt.Fprintf(&b, "calls failed %d of %d, requests failed %d, writes acknowledged %d, lost %d, stale "+
		"answers %d of %d,\n"+
		"events %d in %d watches, missed or twice or out of order %d, watches of other replicas ended %d\n\n",
		seen.Failed, seen.Calls, served.failed, seen.Acked, seen.Lost, seen.Stale, seen.Reads+seen.Acked, seen.Events,
		seen.Watches, seen.Wrong, seen.Broken)
	if err := figures.Histogram(&b, 50, figures.Named{Name: "calls, ms", Samples: calls}); err != nil {
		t.Fatal(err)
	}
	verdict := "all promises were kept"
	if t.Failed() || seen.Err() != nil {
		verdict = "NOT all promises were kept"
	}
	t.Logf("\n%s\n%s", b.String(), verdict)
}
