package crd_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/internal/await"
)

const crontabsPath = "/apis/stable.example.com/v1/namespaces/default/crontabs"

// F15: a definition that is created is a kind a moment later: its objects are validated, pruned,
// defaulted, listed as its columns say and watched; a definition that is deleted takes them along.
func TestCustomResources(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	r.Establish(c, apiservertest.Crontabs)
	json := []string{"Content-Type", "application/json"}

	lines, done := r.WatchLines(c, crontabsPath+"?watch=1")
	r.OK(r.Call(c, "POST", crontabsPath+"?fieldValidation=Ignore",
		apiservertest.Crontab("a", `{"cronSpec":"* * * * */5","bogus":1,"ports":[{"name":"x"}]}`), json...),
		`"image":"busybox"`, `"replicas":1`, `"number":80`, `"generation":1`)
	if got := r.OK(r.Call(c, "GET", crontabsPath+"/a", "")).Body; strings.Contains(got, "bogus") {
		t.Fatalf("an unknown field is stored: %s", got)
	}
	if first := <-lines; !strings.Contains(first, `"ADDED"`) || !strings.Contains(first, "busybox") {
		t.Fatalf("the watch shows %s", first)
	}
	done()
	r.Refused(r.Call(c, "POST", crontabsPath+"?fieldValidation=Strict",
		apiservertest.Crontab("b", `{"cronSpec":"* * * * *","bogus":1}`), json...),
		400, `unknown field "spec.bogus"`)
	if a := r.OK(r.Call(c, "POST", crontabsPath, apiservertest.Crontab("warned", `{"cronSpec":"* * * * *","bogus":1}`),
		json...)); !strings.Contains(a.Header.Get("Warning"), `unknown field \"spec.bogus\"`) {
		t.Fatalf("warnings are %q", a.Header.Get("Warning"))
	}
	table := r.OK(r.Call(c, "GET", crontabsPath, "", "Accept", "application/json;as=Table;g=meta.k8s.io;v=v1")).Body
	for _, want := range []string{`"name":"Spec"`, `"cells":["a","* * * * */5",1,"x","`} {
		if !strings.Contains(table, want) {
			t.Errorf("no %s in the table %s", want, table)
		}
	}
	if got := r.OK(r.Call(c, "GET", crontabsPath+"?fieldSelector=spec.image%3Dbusybox", ""),
		`"name":"a"`); strings.Contains(
		r.OK(r.Call(c, "GET", crontabsPath+"?fieldSelector=spec.image%3Dother", "")).Body, `"name":"a"`) {
		t.Errorf("selected: %s", got.Body)
	}

	r.OK(r.Call(c, "DELETE", apiservertest.DefinitionsPath+"/crontabs.stable.example.com", ""))
	await.Until(context.Background(), t, await.Patience, 5*time.Millisecond,
		"the deletion of the definition", func() error {
			if a := r.Call(c, "GET", apiservertest.DefinitionsPath+"/crontabs.stable.example.com", ""); a.Code != 404 {
				return apiservertest.ErrNotYet
			}
			return nil
		})
	apiservertest.Eventually(t, func() error { // the server processes the deletion after the store
		if a := r.Call(c, "GET", crontabsPath, ""); a.Code != 404 {
			return fmt.Errorf("its objects are served still: %d %s", a.Code, a.Body)
		}
		return nil
	})
	r.Establish(c, apiservertest.Crontabs)
	if left := r.OK(r.Call(c, "GET", crontabsPath, "")).Body; strings.Contains(left, `"name":"a"`) {
		t.Errorf("objects outlived their definition: %s", left)
	}
}
