// Keelson-entry is the ingress proxy in front of Services. It runs in pods that the control plane
// creates for an IngressClass or for a Gateway.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/cmd/internal/commandline"
	"keelson.dev/keelson/ingressproxy/live"
	"keelson.dev/keelson/ingressproxy/serve"
)

var version = "dev"

func main() {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	_, err := commandline.Execute(ctx, newCommand(log), os.Args[1:])
	if err != nil && !errors.Is(err, context.Canceled) {
		log.Error("stopped", "err", err)
		os.Exit(1)
	}
}

// options are the values of the flags.
type options struct {
	class, gateway, certificates, status, trustedProxies string
	accessLog                                            bool
	shutdownDelay                                        time.Duration
}

// shutdownDelay is the default of --shutdown-delay-duration.
const shutdownDelay = 5 * time.Second

// newCommand returns the root command of the proxy.
func newCommand(log *slog.Logger) *cobra.Command {
	o := &options{}
	c := &cobra.Command{
		Use:   "keelson-entry (--ingress-class NAME | --gateway NAMESPACE/NAME)",
		Short: "Run the ingress proxy of an IngressClass or a Gateway",
		Long:  "Run the ingress proxy of an IngressClass or a Gateway. The control plane runs this program in pods.",
		Example: `  keelson-entry --ingress-class keelson
  keelson-entry --gateway default/web`,
		Version: version,
		Args:    cobra.ArbitraryArgs, // runProxy reports them together with missing flags
		RunE:    func(c *cobra.Command, args []string) error { return runProxy(c.Context(), log, o, args) },
	}
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return fmt.Errorf("reading the flags: %w", err) })
	o.declareFlags(c.Flags())
	return c
}

// declareFlags declares the flags that set the options.
func (o *options) declareFlags(f *pflag.FlagSet) {
	f.StringVar(&o.class, "ingress-class", "", "name of the IngressClass whose Ingresses are served")
	f.StringVar(&o.gateway, "gateway", "", "Gateway that is served, as NAMESPACE/NAME")
	f.StringVar(&o.certificates, "certificates", "/certificates",
		"directory in which the control plane puts TLS certificates and keys")
	f.StringVar(&o.status, "status-address", ":10254", "address of /healthz, /readyz and /metrics")
	f.BoolVar(&o.accessLog, "access-log", false, "log a line for each request")
	f.StringVar(&o.trustedProxies, "trusted-proxies", "",
		"comma-separated CIDRs of proxies whose X-Forwarded headers are trusted")
	f.DurationVar(&o.shutdownDelay, "shutdown-delay-duration", shutdownDelay,
		"how long connections are accepted after SIGTERM, until other components no longer route traffic to this proxy")
	// The previous name of a renamed flag stays valid for one release.
	f.DurationVar(&o.shutdownDelay, "linger", shutdownDelay, "previous name of --shutdown-delay-duration")
	f.Lookup("linger").Hidden = true
}

// runProxy runs the proxy until ctx ends.
func runProxy(ctx context.Context, log *slog.Logger, o *options, args []string) error {
	namespace, name, isName := strings.Cut(o.gateway, "/")
	if (o.class == "") == (o.gateway == "") || o.gateway != "" && (!isName || namespace == "" || name == "") ||
		len(args) > 0 {
		return errors.New("exactly one of --ingress-class NAME and --gateway NAMESPACE/NAME is required, without " +
			"arguments: see 'keelson-entry --help'")
	}
	opts := serve.Options{Log: log, Linger: o.shutdownDelay}
	if o.accessLog {
		opts.Access = log
	}
	for text := range strings.SplitSeq(o.trustedProxies, ",") {
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return fmt.Errorf("--trusted-proxies: %w", err)
		}
		opts.Trusted = append(opts.Trusted, p)
	}
	api, err := rest.InClusterConfig()
	if err != nil {
		return fmt.Errorf("finding the API: %w (keelson-entry runs in a pod)", err)
	}
	api.UserAgent = "keelson-entry/" + version
	s := serve.New(opts)
	log.Info("starting", "version", version, "class", o.class, "gateway", o.gateway)
	g, ctx := errgroup.WithContext(ctx)
	pages := statusServer(o.status, s)
	served := make(chan struct{})
	g.Go(func() error { defer close(served); return s.Run(ctx) })
	g.Go(func() error {
		source := live.Ingresses(o.class)
		if o.gateway != "" {
			own, err := portOf(o.status)
			if err != nil {
				return fmt.Errorf("--status-address: %w", err)
			}
			source = live.Gateway(namespace, name, []int32{own})
		}
		return live.Run(ctx, live.Config{API: api, Source: source, Certificates: o.certificates,
			Swap: s.Swap, Log: log})
	})
	g.Go(func() error {
		if err := pages.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serving %s: %w", o.status, err)
		}
		return nil
	})
	g.Go(func() error {
		<-served
		return pages.Close()
	})
	return g.Wait()
}

// portOf returns the port number of address, which has the form HOST:PORT.
func portOf(address string) (int32, error) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return int32(n), err
}

func statusServer(at string, s *serve.Server) *http.Server {
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(s.Collector(), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !s.Ready() {
			http.Error(w, "no table is served yet, or the end is near", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	return &http.Server{Addr: at, Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second,
		IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
}
