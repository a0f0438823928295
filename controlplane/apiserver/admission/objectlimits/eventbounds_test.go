package objectlimits

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
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
)

func anEvent(n int) *corev1.Event {
	return &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("e", n)}}
}

// A namespace that is full of events accepts no more until some are deleted. Its events are not
// counted at each write.
func TestEventsAreBounded(t *testing.T) {
	all := kinds.All()
	w, now := admissiontest.World{}, time.Unix(1000, 0)
	b := NewEventBound(w, func() time.Time { return now })
	b.maxCount = 3
	write := func(n int) string {
		e := anEvent(n)
		a := admissiontest.CreateAttempt(all, e)
		a.Request.Namespace = e.Namespace
		err := b.CheckCreate(t.Context(), a)
		if err == nil {
			w["events"] = append(w["events"], e)
		}
		return admissiontest.ErrorText(err)
	}
	full := func(n int) string {
		return fmt.Sprintf(`events "e%d" is forbidden: namespace default has 3 events, which is the maximum: events `+
			`expire an hour after their last write; delete some, or write fewer`, n)
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
	now = now.Add(recountInterval)
	for n := 8; n < 11; n++ {
		if got := write(n); got != "" {
			t.Errorf("%q", got)
		}
	}
	if got := write(11); got != full(11) {
		t.Errorf("%q", got)
	}
	other := admissiontest.CreateAttempt(all,
		&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "x"}})
	other.Request.Namespace = "kube-system"
	w["events"] = nil
	if err := b.CheckCreate(t.Context(), other); err != nil {
		t.Errorf("another namespace: %v", err)
	}
	if err := b.CheckCreate(t.Context(), admissiontest.UpdateAttempt(all, anEvent(1), anEvent(1))); err != nil {
		t.Errorf("a count: %v", err)
	}
	for n := range maxCounts + 10 {
		e := admissiontest.CreateAttempt(all, anEvent(n))
		e.Request.Namespace = fmt.Sprint("ns", n)
		if err := b.CheckCreate(t.Context(), e); err != nil {
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
	w, now := admissiontest.World{}, time.Unix(1000, 0)
	b := NewEventBound(w, func() time.Time { return now })
	long := func(n, length int) *corev1.Event {
		e := anEvent(n)
		e.Message = strings.Repeat("x", length)
		return e
	}
	if got := admissiontest.ErrorText(b.CheckCreate(t.Context(),
		admissiontest.CreateAttempt(all, long(0, MaxEventSize)))); !strings.Contains(got,
		"bytes, the maximum is 65536: shorten its message") {
		t.Errorf("too long: %q", got)
	}
	old := long(1, 2*MaxEventSize) // created by a release without the limit
	if err := b.CheckCreate(t.Context(), admissiontest.UpdateAttempt(all, old, old)); err != nil {
		t.Errorf("a change of another kind: %v", err)
	}
	b.maxBytes = 3000
	for n := range 2 {
		e := long(n, 1000)
		if err := b.CheckCreate(t.Context(), admissiontest.CreateAttempt(all, e)); err != nil {
			t.Fatal(err)
		}
		w["events"] = append(w["events"], e)
	}
	for what, a := range map[string]*admission.Attempt{"a third": admissiontest.CreateAttempt(all, long(3, 1000)),
		"a longer one": admissiontest.UpdateAttempt(all, long(1, 1000), long(1, 2000))} {
		if got := admissiontest.ErrorText(b.CheckCreate(t.Context(), a)); !strings.Contains(got,
			"which is the maximum") || !strings.Contains(got, "bytes") {
			t.Errorf("%s: %q", what, got)
		}
	}
	if err := b.CheckCreate(t.Context(), admissiontest.UpdateAttempt(all, long(1, 1000), long(1, 900))); err != nil {
		t.Errorf("a shorter one: %v", err)
	}
	b.maxCount, b.maxBytes = 1, 4000 // each replica counts separately, so that a namespace may exceed the limit
	if err := b.CheckCreate(t.Context(), admissiontest.UpdateAttempt(all, long(1, 1000), long(1, 1100))); err != nil {
		t.Errorf("a longer one in a namespace of many: %v", err)
	}
	b.maxCount, b.maxBytes = maxEvents, 3000
	w["events"], now = nil, now.Add(recountInterval)
	if err := b.CheckCreate(t.Context(), admissiontest.CreateAttempt(all, long(4, 1000))); err != nil {
		t.Errorf("when they have gone: %v", err)
	}
}

// A requester with many undecided CertificateSigningRequests can create no more; other requesters
// can.
func TestUndecidedRequestsAreBounded(t *testing.T) {
	all, w := kinds.All(), admissiontest.World{}
	request := func(name, user string,
		conditions ...certificatesv1.RequestConditionType) *certificatesv1.CertificateSigningRequest {
		c := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: certificatesv1.CertificateSigningRequestSpec{Username: user}}
		for _, k := range conditions {
			c.Status.Conditions = append(c.Status.Conditions,
				certificatesv1.CertificateSigningRequestCondition{Type: k, Status: corev1.ConditionTrue})
		}
		return c
	}
	asks := func(user string, groups ...string) string {
		a := admissiontest.CreateAttempt(all, request("new", ""))
		a.User = api.User{Name: user, Groups: groups}
		return admissiontest.ErrorText(LimitUndecidedRequests(w, 2)(t.Context(), a))
	}
	w["certificatesigningrequests"] = []api.Object{request("a", "eve"),
		request("b", "eve", certificatesv1.CertificateApproved),
		request("c", "eve", certificatesv1.CertificateDenied), request("d", "eve", certificatesv1.CertificateFailed),
		request("e", "bob")}
	if got := asks("eve"); got != "" {
		t.Errorf("%q", got)
	}
	w["certificatesigningrequests"] = append(w["certificatesigningrequests"], request("f", "eve"))
	const full = `certificatesigningrequests.certificates.k8s.io "new" is forbidden: eve has 2 undecided certificate ` +
		`signing requests, which is the maximum: approve, deny or delete some; they expire after a day`
	if got := asks("eve"); got != full {
		t.Errorf("%q", got)
	}
	if got := asks("bob") + asks("eve", api.GroupMasters); got != "" {
		t.Errorf("%q", got)
	}
	long := admissiontest.CreateAttempt(all,
		&certificatesv1.CertificateSigningRequest{
			Spec: certificatesv1.CertificateSigningRequestSpec{Request: make([]byte, maxUndecidedBytes)}})
	if long.User.Name = "bob"; !strings.Contains(admissiontest.ErrorText(LimitUndecidedRequests(w, 2)(t.Context(),
		long)), "the maximum is 16777216: approve, deny or delete some") {
		t.Error("requests of any length")
	}
	if got := admissiontest.ErrorText(LimitUndecidedRequests(w, 2)(t.Context(),
		admissiontest.CreateAttempt(all, anEvent(1)))); got != "" {
		t.Errorf("%q", got)
	}
}
