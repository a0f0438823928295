package admission

import (
	"fmt"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

func anEvent(n int) *corev1.Event {
	return &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("e", n)}}
}

// A namespace that is full of events accepts no more until some are deleted. Its events are not
// counted at each write.
func TestEventsAreBounded(t *testing.T) {
	all := kinds.All()
	w, now := world{}, time.Unix(1000, 0)
	b := newEventBound(w, func() time.Time { return now })
	b.most = 3
	write := func(n int) string {
		e := anEvent(n)
		a := making(all, e)
		a.Request.Namespace = e.Namespace
		err := b.admit(t.Context(), a)
		if err == nil {
			w["events"] = append(w["events"], e)
		}
		return said(err)
	}
	full := func(n int) string {
		return fmt.Sprintf(`events "e%d" is forbidden: namespace default has 3 events, which is the most that is kept: they go an hour after they were last written; delete some, or write fewer`, n)
	}
	for n := range 3 {
		if got := write(n); got != "" {
			t.Fatal(got)
		}
	}
	for n := 3; n < 6; n++ {
		if got := write(n); got != full(n) {
			t.Errorf("%q", got)
		}
	}
	w["events"] = nil
	if got := write(7); got != full(7) { // the last count is recent
		t.Errorf("%q", got)
	}
	now = now.Add(recount)
	for n := 8; n < 11; n++ {
		if got := write(n); got != "" {
			t.Errorf("%q", got)
		}
	}
	if got := write(11); got != full(11) {
		t.Errorf("%q", got)
	}
	other := making(all, &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "x"}})
	other.Request.Namespace = "kube-system"
	w["events"] = nil
	if err := b.admit(t.Context(), other); err != nil {
		t.Errorf("another namespace: %v", err)
	}
	if err := b.admit(t.Context(), changing(all, anEvent(1), anEvent(1))); err != nil {
		t.Errorf("a count: %v", err)
	}
	for n := range maxCounts + 10 {
		e := making(all, anEvent(n))
		e.Request.Namespace = fmt.Sprint("ns", n)
		if err := b.admit(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	if len(b.counts) > maxCounts {
		t.Errorf("%d counts are kept", len(b.counts))
	}
}

// The size of an event and of all events of a namespace is limited. Updates that enlarge an event
// count; other updates are admitted.
func TestEventsAreBoundedInBytes(t *testing.T) {
	all := kinds.All()
	w, now := world{}, time.Unix(1000, 0)
	b := newEventBound(w, func() time.Time { return now })
	long := func(n, length int) *corev1.Event {
		e := anEvent(n)
		e.Message = strings.Repeat("x", length)
		return e
	}
	if got := said(b.admit(t.Context(), making(all, long(0, mostOfAnEvent)))); !strings.Contains(got, "and an event may have 65536: shorten its message") {
		t.Errorf("too long: %q", got)
	}
	old := long(1, 2*mostOfAnEvent) // created by a release without the limit
	if err := b.admit(t.Context(), changing(all, old, old)); err != nil {
		t.Errorf("a change of another kind: %v", err)
	}
	b.bytes = 3000
	for n := range 2 {
		e := long(n, 1000)
		if err := b.admit(t.Context(), making(all, e)); err != nil {
			t.Fatal(err)
		}
		w["events"] = append(w["events"], e)
	}
	for what, a := range map[string]*Attempt{"a third": making(all, long(3, 1000)), "a longer one": changing(all, long(1, 1000), long(1, 2000))} {
		if got := said(b.admit(t.Context(), a)); !strings.Contains(got, "which is the most that is kept") || !strings.Contains(got, "bytes") {
			t.Errorf("%s: %q", what, got)
		}
	}
	if err := b.admit(t.Context(), changing(all, long(1, 1000), long(1, 900))); err != nil {
		t.Errorf("a shorter one: %v", err)
	}
	b.most, b.bytes = 1, 4000 // each replica counts separately, so that a namespace may exceed the limit
	if err := b.admit(t.Context(), changing(all, long(1, 1000), long(1, 1100))); err != nil {
		t.Errorf("a longer one in a namespace of many: %v", err)
	}
	b.most, b.bytes = mostEvents, 3000
	w["events"], now = nil, now.Add(recount)
	if err := b.admit(t.Context(), making(all, long(4, 1000))); err != nil {
		t.Errorf("when they have gone: %v", err)
	}
}

// A requester with many undecided CertificateSigningRequests can create no more; other requesters
// can.
func TestUndecidedRequestsAreBounded(t *testing.T) {
	all, w := kinds.All(), world{}
	request := func(name, user string, conditions ...certificatesv1.RequestConditionType) *certificatesv1.CertificateSigningRequest {
		c := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: certificatesv1.CertificateSigningRequestSpec{Username: user}}
		for _, k := range conditions {
			c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: k, Status: corev1.ConditionTrue})
		}
		return c
	}
	asks := func(user string, groups ...string) string {
		a := making(all, request("new", ""))
		a.User = api.User{Name: user, Groups: groups}
		return said(undecidedRequests(w, 2)(t.Context(), a))
	}
	w["certificatesigningrequests"] = []api.Object{request("a", "eve"), request("b", "eve", certificatesv1.CertificateApproved),
		request("c", "eve", certificatesv1.CertificateDenied), request("d", "eve", certificatesv1.CertificateFailed), request("e", "bob")}
	if got := asks("eve"); got != "" {
		t.Errorf("%q", got)
	}
	w["certificatesigningrequests"] = append(w["certificatesigningrequests"], request("f", "eve"))
	const full = `certificatesigningrequests.certificates.k8s.io "new" is forbidden: eve has 2 requests that nobody has approved or denied, which is the most: have them decided, or delete some; they go after a day`
	if got := asks("eve"); got != full {
		t.Errorf("%q", got)
	}
	if got := asks("bob") + asks("eve", api.GroupMasters); got != "" {
		t.Errorf("%q", got)
	}
	long := making(all, &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{Request: make([]byte, mostUndecidedBytes)}})
	if long.User.Name = "bob"; !strings.Contains(said(undecidedRequests(w, 2)(t.Context(), long)), "and 16777216 is the most: have them decided, or delete some") {
		t.Error("requests of any length")
	}
	if got := said(undecidedRequests(w, 2)(t.Context(), making(all, anEvent(1)))); got != "" {
		t.Errorf("%q", got)
	}
}
