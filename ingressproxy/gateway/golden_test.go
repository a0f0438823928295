package gateway

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	gw "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/ingressproxy/route"
	"keelson.dev/keelson/test/testenv/keypair"
)

var rewrite = flag.Bool("rewrite", false, "write the transcripts")

var testTime = metav1.NewTime(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC))

// cluster holds objects by kind.
type cluster struct {
	World
	namespaces map[string]map[string]string
	services   []*corev1.Service
	secrets    []*corev1.Secret
	slices     []*discoveryv1.EndpointSlice
}

func (c *cluster) world() *World {
	c.Namespace = func(name string) (map[string]string, bool) { l, ok := c.namespaces[name]; return l, ok }
	c.Service = func(ns, name string) *corev1.Service {
		for _, s := range c.services {
			if s.Namespace == ns && s.Name == name {
				return s
			}
		}
		return nil
	}
	c.Secret = func(ns, name string) *corev1.Secret {
		for _, s := range c.secrets {
			if s.Namespace == ns && s.Name == name {
				return s
			}
		}
		return nil
	}
	c.Slices = func(ns, service string) (out []*discoveryv1.EndpointSlice) {
		for _, s := range c.slices {
			if s.Namespace == ns && s.Labels[discoveryv1.LabelServiceName] == service {
				out = append(out, s)
			}
		}
		return out
	}
	return &c.World
}

// add adds an object. Its default age follows the order of the calls, one minute apart.
func (c *cluster) add(t *testing.T, data []byte) {
	t.Helper()
	var head metav1.TypeMeta
	if err := yaml.Unmarshal(data, &head); err != nil {
		t.Fatal(err)
	}
	into := func(o metav1.Object) {
		if err := yaml.UnmarshalStrict(data, o); err != nil {
			t.Fatalf("%s\n%v", data, err)
		}
		if o.GetNamespace() == "" {
			o.SetNamespace("default")
		}
	}
	switch head.Kind {
	case "GatewayClass":
		o := &gw.GatewayClass{}
		into(o)
		c.Classes = append(c.Classes, o)
	case "Gateway":
		o := &gw.Gateway{}
		into(o)
		c.Gateways = append(c.Gateways, o)
	case "HTTPRoute":
		o := &gw.HTTPRoute{}
		into(o)
		c.HTTPRoutes = append(c.HTTPRoutes, o)
	case "GRPCRoute":
		o := &gw.GRPCRoute{}
		into(o)
		c.GRPCRoutes = append(c.GRPCRoutes, o)
	case "ReferenceGrant":
		o := &gw.ReferenceGrant{}
		into(o)
		c.Grants = append(c.Grants, o)
	case "Namespace":
		o := &corev1.Namespace{}
		into(o)
		c.namespaces[o.Name] = o.Labels
	case "Service":
		o := &corev1.Service{}
		into(o)
		c.services = append(c.services, o)
	case "EndpointSlice":
		o := &discoveryv1.EndpointSlice{}
		into(o)
		c.slices = append(c.slices, o)
	case "Secret":
		o := &corev1.Secret{}
		into(o)
		if o.Type == corev1.SecretTypeTLS && len(o.Data) == 0 {
			o.Data = keypair.Data(t, strings.Split(o.StringData["for"], ",")...)
		}
		c.secrets = append(c.secrets, o)
	default:
		t.Fatalf("what is a %q?", head.Kind)
	}
}

func readCluster(t *testing.T, path string) *cluster {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{namespaces: map[string]map[string]string{"default": {}}}
	for r := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data))); ; {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return c
		} else if err != nil {
			t.Fatal(err)
		}
		if len(bytes.TrimSpace(doc)) > 0 {
			c.add(t, doc)
		}
	}
}

// Each file is a cluster; the transcript has the statuses and what the proxies serve. -rewrite
// updates the transcripts.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, path := range files {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".yaml"), func(t *testing.T) {
			c := readCluster(t, path)
			got := transcript(c.world())
			golden := strings.TrimSuffix(path, ".yaml") + ".txt"
			if *rewrite {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got:\n%s\nwant:\n%s", got, want)
			}
			if _, wrong := route.Compile(Evaluate(c.world()).Table("default", "g")); len(wrong) > 0 {
				t.Errorf("the table does not compile: %v", wrong)
			}
		})
	}
}

func transcript(w *World) string {
	var b strings.Builder
	conditions := func(indent string, list []metav1.Condition) {
		for _, c := range list {
			fmt.Fprintf(&b, "%s%s=%s %s: %s\n", indent, c.Type, c.Status, c.Reason, c.Message)
		}
	}
	for _, c := range w.Classes {
		if c.Spec.ControllerName == Controller {
			fmt.Fprintf(&b, "GatewayClass %s\n", c.Name)
			conditions("  ", ClassStatus(c, testTime).Conditions)
		}
	}
	j := Evaluate(w)
	address := ProxyState{Addresses: []gw.GatewayStatusAddress{{Value: "192.0.2.1"}}}
	for _, g := range j.Gateways {
		s := g.Status(address, testTime)
		fmt.Fprintf(&b, "Gateway %s ports %v\n", g.Object.Name, g.ServedPorts())
		conditions("  ", s.Conditions)
		for _, l := range s.Listeners {
			var kinds []string
			for _, k := range l.SupportedKinds {
				kinds = append(kinds, string(k.Kind))
			}
			fmt.Fprintf(&b, "  listener %s kinds %v attached %d\n", l.Name, kinds, l.AttachedRoutes)
			conditions("    ", l.Conditions)
		}
	}
	for _, r := range j.Routes {
		fmt.Fprintln(&b, r)
		for _, p := range r.Status(testTime).Parents {
			fmt.Fprintf(&b, "  parent %s %s by %s\n", p.ParentRef.Name, stringOr(p.ParentRef.SectionName, "-"),
				p.ControllerName)
			conditions("    ", p.Conditions)
		}
	}
	for _, g := range j.Gateways {
		printTable(&b, g.Object.Name, j.Table(g.Object.Namespace, g.Object.Name))
	}
	return b.String()
}

func printTable(b *strings.Builder, name string, t *route.Table) {
	fmt.Fprintf(b, "Table of %s\n", name)
	for _, l := range t.Listeners {
		fmt.Fprintf(b, "  %s port %d %s host %s certificates %d\n", l.Name, l.Port, l.Protocol, l.Host,
			len(l.Certificates))
		for _, r := range l.Rules {
			fmt.Fprintf(b, "    %s hosts %v\n", r.Name, r.Hosts)
			for _, m := range r.Matches {
				fmt.Fprintf(b, "      match %+v\n", m)
			}
			f := r.Filters
			if f.Redirect != nil {
				d := *f.Redirect
				d.Path = nil
				fmt.Fprintf(b, "      redirect %+v path %+v\n", d, f.Redirect.Path)
			}
			if f.Rewrite != nil {
				fmt.Fprintf(b, "      rewrite %+v path %+v\n", f.Rewrite.Host, f.Rewrite.Path)
			}
			f.Redirect, f.Rewrite = nil, nil
			fmt.Fprintf(b, "      answer %d%s", r.Answer, more(f))
			if r.Timeouts != (route.Timeouts{}) {
				fmt.Fprintf(b, " timeouts %v", r.Timeouts)
			}
			fmt.Fprintln(b)
			for _, x := range r.Backends {
				fmt.Fprintf(b, "      backend %s weight %d answer %d%s\n", x.Pool, x.Weight, x.Answer, more(x.Filters))
			}
		}
	}
	keys := make([]string, 0, len(t.Pools))
	for k := range t.Pools {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		fmt.Fprintf(b, "  pool %s %v\n", k, t.Pools[k].Endpoints)
	}
}

// more formats the filters, if there are any.
func more(f route.Filters) string {
	if reflect.ValueOf(f).IsZero() {
		return ""
	}
	return fmt.Sprintf(" filters %+v", f)
}
