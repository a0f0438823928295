package server

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
)

// deeds are the lines of a replica's log about verbs, without what differs from run to run.
func deeds(p *plane, name string) []string {
	var out []string
	for line := range strings.Lines(p.members[name].log.String()) {
		_, said, ok := strings.Cut(line, `msg="cluster verb" `)
		if !ok {
			continue
		}
		said = said[strings.Index(said, "user="):]
		if i := strings.LastIndex(said, " took="); i > 0 {
			said = said[:i]
		}
		out = append(out, strings.TrimSpace(said))
	}
	return out
}

// Whoever changes something by a verb of the cluster is in the log, in one line:
// who, what, of what, the outcome, and the reason when it was refused.
func TestVerbsAreRecorded(t *testing.T) {
	p := newPlane(t, 3, nil)
	admin := whoami(t, p)
	leader := p.status("cp1").Leader
	other := map[string]string{"cp1": "cp2", "cp2": "cp3", "cp3": "cp1"}[leader]
	ask := func(at, verb, path string, body any) {
		t.Helper()
		_ = p.call(at, verb, path, body, nil) // that it is refused is among what is to be logged
	}
	ask(other, "POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp9"})
	ask(other, "POST", api.PathClusterCompact, api.ClusterCompact{Revision: 2}) // the leader does it
	ask(other, "POST", api.PathClusterCompact, api.ClusterCompact{Revision: 1 << 40})
	ask(other, "POST", api.PathClusterTokens, map[string]string{"role": "node", "ttl": "1h"})
	ask(other, "DELETE", api.PathClusterMembers+"/cp9", nil)
	ask(other, "POST", api.PathClusterMembers, api.ClusterJoin{Name: "cp9", Address: "nonsense"})
	ask(other, "GET", api.PathClusterMembers, nil)
	ask(other, "GET", api.PathClusterStatus, nil)
	p.backup(other)
	ask(other, "POST", api.PathClusterStepDown, api.ClusterStepDown{To: other})
	as(t, p, other, "mallory")

	got := strings.Join(deeds(p, other), "\n")
	for _, want := range []string{
		fmt.Sprintf(`user=%s verb=step-down object=cp9 outcome=refused reason="stepping down: raftstore: no such member`, admin),
		fmt.Sprintf(`user=%s verb=compact object="revision 2" outcome=done`, admin),
		fmt.Sprintf(`user=%s verb=compact object="revision 1099511627776" outcome=refused reason="--revision 1099511627776 is in the future`, admin),
		fmt.Sprintf(`user=%s verb="token create" object=node outcome=done ttl=1h`, admin),
		fmt.Sprintf(`user=%s verb="member remove" object=cp9 outcome=refused reason="removing replica cp9: raftstore: no such member`, admin),
		fmt.Sprintf(`user=%s verb="member add" object=cp9 outcome=refused reason="adding `, admin),
		fmt.Sprintf(`user=%s verb=backup object="" outcome=done bytes=`, admin),
		fmt.Sprintf(`user=%s verb=step-down object=%s outcome=done leader=%s`, admin, other, leader),
		fmt.Sprintf(`user=mallory verb=DELETE object=/cluster/members/cp1 sender=%s outcome=refused reason="forbidden: User \"mallory\" cannot delete path`, admin),
		fmt.Sprintf(`user=mallory verb=compact object="revision 1" sender=%s outcome=done`, admin),
	} {
		if n := strings.Count(got, want); n != 1 {
			t.Errorf("%d times in the log of %s:\n%s", n, other, want)
		}
	}
	// What the leader did for another replica is logged where it was asked for.
	for _, line := range deeds(p, leader) {
		if strings.Contains(line, "verb=compact") {
			t.Errorf("logged at the leader too: %s", line)
		}
	}
	if t.Failed() {
		t.Logf("%s has logged\n%s", other, got)
	}
	// The replicas that joined asked in their own names.
	joined := slices.Concat(deeds(p, "cp1"), deeds(p, "cp2"), deeds(p, "cp3"))
	for _, name := range []string{"cp2", "cp3"} {
		if want := fmt.Sprintf(`user=%s verb="member add" object=%s outcome=done`, replicaUser+name, name); !strings.Contains(strings.Join(joined, "\n"), want) {
			t.Errorf("missing in all logs: %s", want)
		}
	}
}

// whoami is the user of the administrator's kubeconfig.
func whoami(t *testing.T, p *plane) string {
	t.Helper()
	var review struct {
		Status struct{ UserInfo struct{ Username string } }
	}
	err := p.call("cp1", "POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews",
		map[string]string{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}, &review)
	if err != nil || review.Status.UserInfo.Username == "" {
		t.Fatalf("who am I: %v, %+v", err, review)
	}
	return review.Status.UserInfo.Username
}

// as removes a member and compacts as another user, who may only do the latter.
func as(t *testing.T, p *plane, at, user string) {
	t.Helper()
	cs := p.client(at)
	ctx := context.Background()
	_, err := cs.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "compactor"},
		Rules: []rbacv1.PolicyRule{{Verbs: []string{"post"}, NonResourceURLs: []string{api.PathClusterCompact}}}}, metav1.CreateOptions{})
	if err == nil {
		_, err = cs.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "compactor"},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "compactor"},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}}}, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	cfg := p.rest(at)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: user}
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	send := func(method, path, body string) int {
		req, err := http.NewRequest(method, cfg.Host+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set(headerRecorded, "cp1") // which only a replica may say
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if code := send("DELETE", api.PathClusterMembers+"/cp1", ""); code != http.StatusForbidden {
		t.Errorf("%s removes a member: %d", user, code)
	}
	eventually(t, func() error { // until the authorizer has seen the role
		if code := send("POST", api.PathClusterCompact, `{"revision":1}`); code != http.StatusOK {
			return fmt.Errorf("%s compacts: %d", user, code)
		}
		return nil
	})
}
