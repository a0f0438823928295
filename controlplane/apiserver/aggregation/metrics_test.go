package aggregation_test

import (
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// F133: an APIService that becomes unavailable is counted once, with its reason, until it becomes
// available again. The series of a deleted APIService are deleted.
func TestMetricsOfAvailability(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	b.Extension("good", apiservertest.DiscoveryOf("good.example.com"))
	b.AddAPIService("good.example.com", "good", nil)
	b.AddAPIService("absent.example.com", "nobody", nil)
	c := b.Replica.AdminHTTP()
	const (
		good   = `aggregator_unavailable_apiservice{name="v1.good.example.com"}`
		absent = `aggregator_unavailable_apiservice{name="v1.absent.example.com"}`
		total  = `aggregator_unavailable_apiservice_total{name="v1.absent.example.com",reason="ServiceNotFound"}`
		broken = `aggregator_unavailable_apiservice_total{name="v1.good.example.com",reason="ServicePortError"}`
	)
	expect := func(want map[string]string) {
		t.Helper()
		seen := b.Replica.Series(c)
		for name, value := range want {
			if got := seen[name]; got != value {
				t.Errorf("%s is %q, want %q", name, got, value)
			}
		}
	}
	check := func() {
		t.Helper()
		if err := b.Replica.CheckAPIServices(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
	check()
	expect(map[string]string{good: "0", absent: "1", total: "1", broken: ""})
	const path = "/apis/apiregistration.k8s.io/v1/apiservices/v1.good.example.com"
	b.Replica.OK(b.Replica.Call(c, "PATCH", path, `{"spec":{"service":{"port":444}}}`, "Content-Type",
		"application/merge-patch+json"))
	b.Replica.Await(func() bool {
		s, ok := b.Replica.CachedAPIService(t.Context(), "v1.good.example.com")
		return ok && *s.Spec.Service.Port == 444
	})
	check()
	check()
	expect(map[string]string{good: "1", broken: "1", total: "1"})
	b.Replica.OK(b.Replica.Call(c, "DELETE", path, ""))
	b.Replica.Await(func() bool { _, ok := b.Replica.CachedAPIService(t.Context(), "v1.good.example.com"); return !ok })
	for name := range b.Replica.Series(c) {
		if strings.HasPrefix(name, "aggregator_") && strings.Contains(name, "good") {
			t.Errorf("the deleted APIService has %s", name)
		}
	}
}
