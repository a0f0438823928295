package operator_test

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
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// loggedOperations returns the attributes of the messages "cluster verb" in a replica's log,
// without the parts that differ from run to run.
func loggedOperations(p *plane, name string) []string {
	var out []string
	for line := range strings.Lines(p.Members[name].Log.String()) {
		_, attributes, ok := strings.Cut(line, `msg="cluster verb" `)
		if !ok {
			continue
		}
		attributes = attributes[strings.Index(attributes, "user="):]
		if i := strings.LastIndex(attributes, " took="); i > 0 {
			attributes = attributes[:i]
		}
		out = append(out, strings.TrimSpace(attributes))
	}
	return out
}

// Each change through the cluster API is logged in one message: user, verb, object, outcome, and
// the reason if the request was refused.
func TestOperationsAreLogged(t *testing.T) {
	p := newPlane(t, 3, nil)
	admin := currentUser(t, p)
	leader := p.ClusterStatus("cp1").Leader
	other := map[string]string{"cp1": "cp2", "cp2": "cp3", "cp3": "cp1"}[leader]
	sendRequest := func(at, verb, path string, body any) {
		t.Helper()
		_ = p.Call(at, verb, path, body, nil) // refused requests must be logged too
	}
	sendRequest(other, "POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp9"})
	sendRequest(other, "POST", api.PathClusterCompact, api.ClusterCompact{Revision: 2}) // forwarded to the leader
	sendRequest(other, "POST", api.PathClusterCompact, api.ClusterCompact{Revision: 1 << 40})
	sendRequest(other, "POST", api.PathClusterTokens, map[string]string{"role": "node", "ttl": "1h"})
	sendRequest(other, "DELETE", api.PathClusterMembers+"/cp9", nil)
	sendRequest(other, "POST", api.PathClusterMembers, api.ClusterJoin{Name: "cp9", Address: "nonsense"})
	sendRequest(other, "GET", api.PathClusterMembers, nil)
	sendRequest(other, "GET", api.PathClusterStatus, nil)
	p.Backup(other)
	sendRequest(other, "POST", api.PathClusterStepDown, api.ClusterStepDown{To: other})
	changeAsUser(t, p, other, "mallory")

	got := strings.Join(loggedOperations(p, other), "\n")
	for _, want := range []string{
		fmt.Sprintf(`user=%s verb=step-down object=cp9 outcome=refused reason="stepping down: raftstore: no `+
			`such member`, admin),
		fmt.Sprintf(`user=%s verb=compact object="revision 2" outcome=done`, admin),
		fmt.Sprintf(`user=%s verb=compact object="revision 1099511627776" outcome=refused reason="--revision `+
			`1099511627776 is in the future`, admin),
		fmt.Sprintf(`user=%s verb="token create" object=node outcome=done ttl=1h`, admin),
		fmt.Sprintf(`user=%s verb="member remove" object=cp9 outcome=refused reason="removing replica cp9: raftstore: `+
			`no such member`, admin),
		fmt.Sprintf(`user=%s verb="member add" object=cp9 outcome=refused reason="adding `, admin),
		fmt.Sprintf(`user=%s verb=backup object="" outcome=done bytes=`, admin),
		fmt.Sprintf(`user=%s verb=step-down object=%s outcome=done leader=%s`, admin, other, leader),
		fmt.Sprintf(`user=mallory verb=DELETE object=/cluster/members/cp1 sender=%s outcome=refused `+
			`reason="forbidden: User \"mallory\" cannot delete path`, admin),
		fmt.Sprintf(`user=mallory verb=compact object="revision 1" sender=%s outcome=done`, admin),
	} {
		if n := strings.Count(got, want); n != 1 {
			t.Errorf("the log of %[2]s has this message %[1]d times, want once:\n%[3]s", n, other, want)
		}
	}
	// A forwarded request is logged by the replica that received it from the client.
	for _, line := range loggedOperations(p, leader) {
		if strings.Contains(line, "verb=compact") {
			t.Errorf("a forwarded request is also logged by the leader: %s", line)
		}
	}
	if t.Failed() {
		t.Logf("the log of %s has\n%s", other, got)
	}
	// The requests of joining replicas are logged with the names of the replicas.
	joined := slices.Concat(loggedOperations(p, "cp1"), loggedOperations(p, "cp2"), loggedOperations(p, "cp3"))
	for _, name := range []string{"cp2", "cp3"} {
		if want := fmt.Sprintf(`user=%s verb="member add" object=%s outcome=done`, clusterhttp.ReplicaUserPrefix+name,
			name); !strings.Contains(strings.Join(joined, "\n"), want) {
			t.Errorf("no log has the message %s", want)
		}
	}
}

// currentUser returns the user name of the administrator's kubeconfig.
func currentUser(t *testing.T, p *plane) string {
	t.Helper()
	var review struct {
		Status struct{ UserInfo struct{ Username string } }
	}
	err := p.Call("cp1", "POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews",
		map[string]string{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}, &review)
	if err != nil || review.Status.UserInfo.Username == "" {
		t.Fatalf("SelfSubjectReview: error %v, result %+v", err, review)
	}
	return review.Status.UserInfo.Username
}

// changeAsUser sends a removal of a member and a compaction as an impersonated user who may only
// compact.
func changeAsUser(t *testing.T, p *plane, at, user string) {
	t.Helper()
	cs := p.Client(at)
	ctx := context.Background()
	_, err := cs.RbacV1().ClusterRoles().Create(ctx,
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "compactor"},
			Rules: []rbacv1.PolicyRule{{Verbs: []string{"post"}, NonResourceURLs: []string{api.PathClusterCompact}}}},
		metav1.CreateOptions{})
	if err == nil {
		_, err = cs.RbacV1().ClusterRoleBindings().Create(ctx,
			&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "compactor"},
				RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "compactor"},
				Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}}},
			metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	cfg := p.RESTConfig(at)
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
		req.Header.Set(clusterhttp.HeaderRecorded, "cp1") // ignored, because the sender is not a replica
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if code := send("DELETE", api.PathClusterMembers+"/cp1", ""); code != http.StatusForbidden {
		t.Errorf("removal of a member by %s: status %d, want %d", user, code, http.StatusForbidden)
	}
	servertest.Eventually(t, func() error { // until the authorizer has the role
		if code := send("POST", api.PathClusterCompact, `{"revision":1}`); code != http.StatusOK {
			return fmt.Errorf("compaction by %s: status %d", user, code)
		}
		return nil
	})
}
