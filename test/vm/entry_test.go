package vm

import (
	"fmt"
	"strings"
)

// ingress is an IngressClass, and an Ingress that leads to the example.
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

// checkIngress requests the example through an Ingress and deletes the Ingress. The image of the
// proxy is part of the release, because no registry is reachable.
func (c *vmCluster) checkIngress() error {
	if err := c.applyManifest("entry", ingress); err != nil {
		return err
	}
	release, err := c.all[c.apiMachine].runCommand("keelson-controlplane --version | sed -n '1s/.* //p'")
	if err != nil {
		return err
	}
	err = c.awaitOutput("keelson.dev/entry:"+strings.TrimSpace(release)+" true", "-n", "keelson-entry",
		"get", "pods", "-o",
		"jsonpath={range .items[*]}{.spec.containers[0].image} {.status.containerStatuses[0].ready}{end}")
	if err == nil {
		err = awaitCondition(func() error {
			port, err := c.runKctl("-n", "keelson-entry", "get", "service", "web", "-o",
				"jsonpath={.spec.ports[0].nodePort}")
			if err != nil {
				return err
			}
			out, err := c.all["w1"].runCommand("curl -s -m 10 -H 'Host: hello.example' http://" + c.all["w1"].address +
				":" + port + "/")
			if err == nil && !strings.Contains(out, "Hello from Keelson") {
				err = fmt.Errorf("the Ingress responds with %q", out)
			}
			return err
		})
	}
	if err != nil {
		return err
	}
	if _, err := c.runKctl("delete", "ingress/hello", "ingressclass/web"); err != nil {
		return err
	}
	return awaitCondition(func() error {
		out, err := c.runKctl("-n", "keelson-entry", "get", "pods", "-o", "name")
		if err == nil && strings.TrimSpace(out) != "" {
			err = fmt.Errorf("proxies without a class exist: %s", out)
		}
		return err
	})
}
