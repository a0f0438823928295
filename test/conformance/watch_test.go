package conformance

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
)

// event is a line of a watch.
type event struct {
	Type   string
	Object object
}

// follow begins a watch; next waits for its next event, end ends it.
func (u *kindUnderTest) follow(t *testing.T, query ...string) (next func() event, end func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	req, err := http.NewRequestWithContext(ctx, "GET",
		u.url+with(u.path(), append(query, "watch=1", fmt.Sprintf("timeoutSeconds=%.0f", patience.Seconds()))...), nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := u.client.Do(req)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("watch: %v %v", resp, err)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	next = func() event {
		t.Helper()
		var e event
		if !lines.Scan() {
			t.Fatalf("the watch has ended: %v", lines.Err())
		}
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatal(err)
		}
		return e
	}
	return next, func() { cancel(); resp.Body.Close() }
}

func watches(t *testing.T, u *kindUnderTest) {
	const selector = "labelSelector=seen%3Dwatch"
	before := u.want(t, 200, "GET", with(u.path(), selector), nil).object().version()
	next, end := u.follow(t, selector, "resourceVersion="+before)
	defer end()
	u.make(t, labelled("seen", "unwatched"))
	o := u.make(t, labelled("seen", "watch"))
	changed := u.want(t, 200, "PATCH", u.path(o.name()), labelled("changed", "yes"), contentType, mergePatch).object()
	u.want(t, 200, "DELETE", u.path(o.name()), background)
	lingers := u.row.Lingers != ""
	if lingers {
		u.gone(t, o.name())
	}
	last := o.version()
	for _, want := range []string{"ADDED", "MODIFIED", "MODIFIED", "DELETED"} {
		if want == "MODIFIED" && last == changed.version() && !lingers {
			continue
		}
		e := next()
		if e.Type != want || e.Object.name() != o.name() || e.Object.uid() != o.uid() ||
			e.Object.text("kind") != u.GVK.Kind {
			t.Fatalf("%s %v, want %s of %s", e.Type, e.Object, want, o.name())
		}
		last = e.Object.version()
	}
	// What leaves the selector is deleted for the watch, what comes into it is added.
	o = u.make(t, labelled("seen", "unwatched"))
	for _, seen := range []string{"watch", "no"} {
		u.want(t, 200, "PATCH", u.path(o.name()), labelled("seen", seen), contentType, mergePatch)
		want := map[string]string{"watch": "ADDED", "no": "DELETED"}[seen]
		if e := next(); e.Type != want || e.Object.name() != o.name() {
			t.Errorf("%s %v, want %s", e.Type, e.Object, want)
		}
	}
	// The present state and where it ends.
	there := u.make(t, labelled("seen", "initial"))
	initial, stop := u.follow(t, "labelSelector=seen%3Dinitial", "sendInitialEvents=true",
		"resourceVersionMatch=NotOlderThan", "allowWatchBookmarks=true")
	defer stop()
	if e := initial(); e.Type != "ADDED" || e.Object.name() != there.name() {
		t.Errorf("%s %v", e.Type, e.Object)
	}
	e := initial()
	if e.Type != "BOOKMARK" || e.Object.version() == "" || e.Object.text("kind") != u.GVK.Kind ||
		e.Object.at("metadata", "annotations", "k8s.io/initial-events-end") != "true" {
		t.Errorf("%s %v", e.Type, e.Object)
	}
}
