package vm

import (
	"fmt"
	"strings"
)

// ingress is a class of Ingresses, and one that leads to the example.
const ingress = `apiVersion: networking.k8s.io/v1
kind: IngressClass
metadata: {name: web}
spec: {controller: keelson.dev/ingress}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: hello}
spec:
  ingressClassName: web
  rules:
  - host: hello.example
    http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: hello, port: {number: 80}}}}]}
`

// entry asks the example by an Ingress. The image of its proxy comes with the release that the replicas run, since no registry is
// within reach. It goes again, so that no other step minds it.
func (c *cluster) entry() error {
	if err := c.apply("entry", ingress); err != nil {
		return err
	}
	release, err := c.all[c.asked].run("keelson-controlplane --version | sed -n '1s/.* //p'")
	if err != nil {
		return err
	}
	err = c.says("keelson.dev/entry:"+strings.TrimSpace(release)+" true", "-n", "keelson-entry", "get", "pods", "-o",
		"jsonpath={range .items[*]}{.spec.containers[0].image} {.status.containerStatuses[0].ready}{end}")
	if err == nil {
		err = until(func() error {
			port, err := c.kctl("-n", "keelson-entry", "get", "service", "web", "-o", "jsonpath={.spec.ports[0].nodePort}")
			if err != nil {
				return err
			}
			out, err := c.all["w1"].run("curl -s -m 10 -H 'Host: hello.example' http://" + c.all["w1"].address + ":" + port + "/")
			if err == nil && !strings.Contains(out, "Hello from Keelson") {
				err = fmt.Errorf("the Ingress answers %q", out)
			}
			return err
		})
	}
	if err != nil {
		return err
	}
	if _, err := c.kctl("delete", "ingress/hello", "ingressclass/web"); err != nil {
		return err
	}
	return until(func() error {
		out, err := c.kctl("-n", "keelson-entry", "get", "pods", "-o", "name")
		if err == nil && strings.TrimSpace(out) != "" {
			err = fmt.Errorf("proxies of no class are there: %s", out)
		}
		return err
	})
}
