package conformance

import (
	"fmt"
	"strings"
	"testing"
)

// An eviction that cannot be is refused with the reason and the causes that Kubernetes gives, and spends nothing of a
// budget; one that can marks the pod as disrupted, for who counts its failure.
func TestEviction(t *testing.T) {
	u := load(t, shared, shared.kindOf(t, "pods")).inNamespace(t, "evictions")
	budgets := "/apis/policy/v1/namespaces/evictions/poddisruptionbudgets"
	budget := func(name, app string, least int) {
		u.want(t, 201, "POST", budgets, object{"metadata": map[string]any{"name": name},
			"spec": map[string]any{"minAvailable": least,
				"selector": map[string]any{"matchLabels": map[string]any{"app": app}}}})
	}
	pod := func(app string) object {
		o := u.make(t, labelled("app", app),
			object{"metadata": map[string]any{"finalizers": []any{"example.com/kept"}}})
		return u.want(t, 200, "PATCH", u.path(o.name(), "status"), object{"status": map[string]any{"phase": "Running",
			"conditions": []any{map[string]any{"type": "Ready", "status": "True"}}}}, contentType, mergePatch).object()
	}
	budget("free", "free", 0)
	budget("full", "full", 1)
	budget("first", "both", 0)
	budget("second", "both", 0)
	free, full, both := pod("free"), pod("full"), pod("both")

	eviction := func(name string, options object) object {
		o := object{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": map[string]any{"name": name}}
		if options != nil {
			o["deleteOptions"] = options
		}
		return o
	}
	for _, c := range []struct {
		why  string
		pod  object
		body object
		want string
	}{
		{"no name", free, eviction("", nil), "400 BadRequest name in URL does not match name in Eviction object"},
		{"another name", free, eviction("other", nil),
			"400 BadRequest name in URL does not match name in Eviction object"},
		{"no pod", object{"metadata": map[string]any{"name": "gone"}}, eviction("gone", nil),
			`404 NotFound pods "gone" not found`},
		{"orphans twice", free, eviction(free.name(), object{"orphanDependents": true, "propagationPolicy": "Orphan"}),
			"422 Invalid propagationPolicy: Invalid value: \"Orphan\": orphanDependents and deletionPropagation " +
				"cannot be both set"},
		{"another policy", free, eviction(free.name(), object{"propagationPolicy": "Sideways"}),
			`422 Invalid propagationPolicy: Unsupported value: "Sideways": supported values: "Foreground", ` +
				`"Background", "Orphan", "nil"`},
		{"another dry run", free, eviction(free.name(), object{"dryRun": []any{"Some"}}),
			`422 Invalid dryRun: Unsupported value: ["Some"]: supported values: "All"`},
		{"another pod", free, eviction(free.name(), object{"preconditions": object{"uid": "no"}}), "409 Conflict"},
		{"an older pod", free, eviction(free.name(), object{"preconditions": object{"resourceVersion": "1"}}),
			"409 Conflict"},
		{"a budget that is spent", full, eviction(full.name(), nil),
			"429 TooManyRequests : The disruption budget full needs 1 healthy pods and has 1 currently"},
		{"two budgets", both, eviction(both.name(), nil),
			"500  This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."},
	} {
		a := u.send(t, "POST", u.path(c.pod.name(), "eviction"), c.body)
		got := fmt.Sprintf("%d %s", a.code, a.object().text("reason"))
		if lines := causes(a); len(lines) > 0 {
			got += " " + strings.Join(lines, "; ")
		} else if !strings.HasSuffix(c.want, "Conflict") {
			got += " " + a.object().message()
		}
		if got != c.want {
			t.Errorf("%s:\n got  %s\n want %s", c.why, got, c.want)
		}
		// A client waits for Retry-After and does not show the message to its user.
		if after := a.header.Get("Retry-After"); after != "" {
			t.Errorf("%s: come again after %s", c.why, after)
		}
	}
	disrupted := func(name string) any {
		return u.want(t, 200, "GET", budgets+"/"+name, nil).object().at("status", "disruptedPods")
	}
	if got := disrupted("free"); got != nil {
		t.Errorf("refused evictions have spent %v", got)
	}
	condition := func(name string) object {
		list, _ := u.get(t, name).at("status", "conditions").([]any)
		for _, c := range list {
			if c := object(c.(map[string]any)); c.text("type") == "DisruptionTarget" {
				return c
			}
		}
		return nil
	}
	now := object{"preconditions": object{"uid": free.uid(), "resourceVersion": free.version()}}
	u.want(t, 201, "POST", with(u.path(free.name(), "eviction"), "dryRun=All"), eviction(free.name(), now))
	if c := condition(free.name()); c != nil || disrupted("free") != nil {
		t.Errorf("a dry run has marked the pod: %v, and spent %v", c, disrupted("free"))
	}
	u.want(t, 201, "POST", u.path(free.name(), "eviction"), eviction(free.name(), now))
	c := condition(free.name())
	if c.text("status") != "True" || c.text("reason") != "EvictionByEvictionAPI" ||
		c.text("lastTransitionTime") == "" || !u.get(t, free.name()).deleted() {
		t.Errorf("an evicted pod has %v", c)
	}
	if spent, _ := disrupted("free").(map[string]any); len(spent) != 1 {
		t.Errorf("an eviction has spent %v", spent)
	}
}
