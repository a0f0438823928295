package server_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// twoVersionDefinition is a definition with two versions; its arguments select the storage version.
const twoVersionDefinition = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"crontabs.stable.example.com"},
"spec":{"group":"stable.example.com","scope":"Namespaced","names":{"plural":"crontabs","kind":"CronTab"},"versions":[
{"name":"v1","served":true,"storage":%v,"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}},
{"name":"v2","served":true,"storage":%v,"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}`

// A replica whose log starts after its snapshot restores all state of the API from the snapshot:
// definitions and their kinds, objects in the old and in the new stored version, field managers,
// and resources that several groups serve.
func TestStateComesFromASnapshot(t *testing.T) {
	p := newPlane(t, 1, nil)
	ctx := context.Background()
	do := func(verb, path, media, body string) string {
		t.Helper()
		r := p.Client("cp1").RESTClient().Verb(verb).RequestURI(path).SetHeader("Content-Type", media)
		if body != "" {
			r = r.Body([]byte(body))
		}
		data, err := r.DoRaw(ctx)
		if err != nil {
			t.Fatalf("%s %s: %v: %s", verb, path, err, data)
		}
		return string(data)
	}
	const definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	const apply, asJSON = string(types.ApplyYAMLPatchType), "application/json"
	do("PATCH", definitions+"/crontabs.stable.example.com?fieldManager=t", apply,
		fmt.Sprintf(twoVersionDefinition, true, false))
	old, present := "/apis/stable.example.com/v1/namespaces/default/crontabs",
		"/apis/stable.example.com/v2/namespaces/default/crontabs"
	servertest.Eventually(t, func() error {
		return p.Client("cp1").RESTClient().Get().RequestURI(present).Do(ctx).Error()
	})
	do("PATCH", old+"/in-v1?fieldManager=one", apply,
		`{"apiVersion":"stable.example.com/v1","kind":"CronTab","metadata":{"name":"in-v1"},"spec":{"a":1}}`)
	do("PATCH", definitions+"/crontabs.stable.example.com?fieldManager=t", apply,
		fmt.Sprintf(twoVersionDefinition, false, true))
	do("PATCH", present+"/in-v2?fieldManager=one", apply,
		`{"apiVersion":"stable.example.com/v2","kind":"CronTab","metadata":{"name":"in-v2"},"spec":{"a":1}}`)
	do("PATCH", present+"/in-v2?fieldManager=two", apply,
		`{"apiVersion":"stable.example.com/v2","kind":"CronTab","metadata":{"name":"in-v2"},"spec":{"b":2}}`)
	do("POST", "/apis/autoscaling/v1/namespaces/default/horizontalpodautoscalers", asJSON,
		`{"metadata":{"name":"h"},"spec":{"maxReplicas":3,"scaleTargetRef":{"kind":"Deployment","name":"d",`+
			`"apiVersion":"apps/v1"},"targetCPUUtilizationPercentage":50}}`)
	do("POST", "/api/v1/namespaces/default/events", asJSON,
		`{"metadata":{"name":"e"},"involvedObject":{"namespace":"default","kind":"Pod","name":"p"},"reason":"Told",`+
			`"type":"Normal"}`)
	reads := []string{
		definitions + "/crontabs.stable.example.com", old + "/in-v1", present + "/in-v1", old + "/in-v2",
		present + "/in-v2",
		"/apis/autoscaling/v1/namespaces/default/horizontalpodautoscalers/h",
		"/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers/h",
		"/api/v1/namespaces/default/events/e", "/apis/events.k8s.io/v1/namespaces/default/events/e",
		"/api/v1/namespaces/default",
		"/apis/rbac.authorization.k8s.io/v1/clusterroles/view",
	}
	readAll := func() map[string]string {
		seen := map[string]string{}
		for _, path := range reads {
			seen[path] = do("GET", path, asJSON, "")
		}
		return seen
	}
	servertest.Eventually(t, func() error { // its controller writes once that there is nothing to scale
		if now := do("GET", "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers/h", asJSON,
			""); !strings.Contains(now, `"AbleToScale"`) {
			return errors.New(now)
		}
		return nil
	})
	before := readAll()
	backup := p.Backup("cp1")
	p.StopReplica("cp1")
	cfg := p.Members["cp1"].Config
	if _, err := recovery.Restore(cfg.Dir(), backup, recovery.RestoreOptions{Replace: true}); err != nil {
		t.Fatal(err)
	}
	for i, round := range []string{"without a log", "with a log that starts after the snapshot"} {
		found, err := recovery.Inspect(cfg.Dir())
		if err != nil {
			t.Fatal(err)
		}
		if d := found.Disk; len(d.Snapshots) == 0 || d.First != 0 && d.First <= d.Snapshots[len(d.Snapshots)-1].Index {
			t.Fatalf("%s: the log overlaps the snapshot: %+v", round, d)
		}
		p.Restart("cp1")
		for path, was := range before {
			servertest.Eventually(t, func() error {
				if now := do("GET", path, asJSON, ""); now != was {
					return fmt.Errorf("%s: %s was\n%s\nand is\n%s", round, path, was, now)
				}
				return nil
			})
		}
		p.PutConfigMap("cp1", fmt.Sprint("after-restart-", i))
		p.StopReplica("cp1")
	}
	p.Restart("cp1")
	p.CheckConfigMaps("cp1", "after-restart-0", "after-restart-1")
}
